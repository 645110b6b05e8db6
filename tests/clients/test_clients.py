"""Real clients against `mlaforge serve`: the program of each client with SmolLM2 and with a tiny GPT-OSS.

`make test-clients` installs the clients into environments of their own and sets MLAFORGE_CLIENTS. A case that cannot
work with a model is an expectation with its reason: it must fail, too. results/clients.md lists what works.
"""

import os
from pathlib import Path

import pytest

from mlaforge.engine.request import harmony
from support import client_table, harmony_agent
from support.served_process import served_process

RESULTS = Path(__file__).parents[2] / "results" / "clients.md"
MODELS = ("smollm2", "harmony")
# Model -> reason why it fails -> client -> cases.
EXPECTED = {
    "smollm2": {
        "its chat template has no tools, so that it calls one only if tool_choice requires it": {
            "openai": {"tools_auto", "responses_tools_auto"},
            "openai-node": {"tools_auto", "run_tools", "responses_tools_auto"},
            "openai-agents": {"responses_tools_auto", "chat_tools_auto"},
            "pydantic-ai": {"responses_tools", "chat_tools"},
            "langchain": {
                "tools_auto", "agent_with_a_tool", "responses_tools_auto", "responses_agent_with_a_tool",
            },
            "litellm": {"openai_tools_auto", "hosted_vllm_tools_auto"},
            "llama-index": {"tools_auto", "agent_with_a_tool", "agent_in_a_stream"},
            "llm": {"tools"},
            "autogen": {"tools_auto", "agent_with_a_tool"},
            "haystack": {"tools_auto", "agent_with_a_tool"},
            "ai-sdk-openai": {
                "responses_agent", "responses_agent_in_a_stream", "chat_agent", "chat_agent_in_a_stream",
            },
            "ai-sdk-openai-compatible": {"chat_agent", "chat_agent_in_a_stream"},
            "anthropic": {"tools_auto"},
        },
        "the client sends the schema as text of the prompt, which so small a model does not follow": {
            "pydantic-ai": {"responses_structured_PromptedOutput", "chat_structured_PromptedOutput"},
            "instructor": {"json"},
        },
    },
    "harmony": {
        "the client sends the schema as text of the prompt, which the tiny model does not read": {
            "pydantic-ai": {"responses_structured_PromptedOutput", "chat_structured_PromptedOutput"},
            "instructor": {"json"},
        },
    },
}  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environments():
    folder = os.environ.get("MLAFORGE_CLIENTS")
    if folder is None:
        pytest.skip("MLAFORGE_CLIENTS names no folder with the clients' environments (make test-clients)")
    return Path(folder)


@pytest.fixture(scope="module")
def results():
    """(client, model) -> version and errors; written as a table at the end."""
    results = {}
    yield results
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(client_table.markdown(results, MODELS), encoding="utf-8")


def greedy(source, directory):
    """Make links to a model whose answers are the same in every run."""
    directory.mkdir()
    for path in source.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "generation_config.json").write_text('{"temperature": 0}')
    return directory


@pytest.fixture(scope="module", params=MODELS)
def served(request, environments, tmp_path_factory):
    """(name of the model, URL) of a server."""
    folder = tmp_path_factory.mktemp("served")
    if request.param == "smollm2":
        directory = greedy(request.getfixturevalue("smollm2"), folder / "smollm2")
    else:
        pytest.importorskip("openai_harmony")
        directory = harmony_agent.save(folder / "harmony", harmony.encoding())
    with served_process(directory, folder / "log") as url:
        yield request.param, url


@pytest.mark.parametrize("name", client_table.CLIENTS)
def test_client(name, served, environments, results, tmp_path):
    model, url = served
    if (name, model) == ("schemathesis", "smollm2"):
        pytest.skip("generated requests leave max_tokens out: each would fill SmolLM2's context")
    client = client_table.CLIENTS[name]
    if (command := client.command(environments)) is None:
        pytest.skip(f"{client.environment} is not installed (make test-clients)")
    # Telemetry and remote tables of models would wait for a network.
    environment = {
        **dict.fromkeys(("DO_NOT_TRACK", "LITELLM_LOCAL_MODEL_COST_MAP", "HF_HUB_OFFLINE"), "true"),
        "HAYSTACK_TELEMETRY_ENABLED": "false", "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1",
        "PATH": os.environ["PATH"], "MLAFORGE_URL": f"{url}/v1", "MLAFORGE_MODEL": "m",
    }  # fmt: skip
    version, errors = results[name, model] = client.run(command, tmp_path, **environment)
    expected = set().union(*(cases.get(name, set()) for cases in EXPECTED[model].values()))
    failed = {case: error for case, error in errors.items() if error is not None}
    assert set(failed) == expected, (version, failed)

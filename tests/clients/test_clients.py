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
IGNORES_TOOLS = "SmolLM2's chat template has no tools, so that it calls one only if tool_choice requires it"
UNSTEADY = "SmolLM2 does not follow instructions: an answer of its own accord is no JSON, or names no tool"
NO_SCHEMA = "the tiny model writes no object of its own accord, and the request has no schema"
# (client, model, case) -> why it cannot work.
EXPECTED = {
    ("openai", "smollm2", "tools_auto"): IGNORES_TOOLS,
}
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


@pytest.fixture(scope="module", params=MODELS)
def served(request, environments, tmp_path_factory):
    """(name of the model, URL) of a server."""
    folder = tmp_path_factory.mktemp("served")
    if request.param == "smollm2":
        directory = request.getfixturevalue("smollm2")
    else:
        pytest.importorskip("openai_harmony")
        directory = harmony_agent.save(folder / "harmony", harmony.encoding())
    with served_process(directory, folder / "log") as url:
        yield request.param, url


@pytest.mark.parametrize("name", client_table.CLIENTS)
def test_client(name, served, environments, results, tmp_path):
    model, url = served
    client = client_table.CLIENTS[name]
    if (command := client.command(environments)) is None:
        pytest.skip(f"{client.environment} is not installed (make test-clients)")
    # Telemetry and remote tables of models would wait for a network.
    environment = {
        **dict.fromkeys(("DO_NOT_TRACK", "LITELLM_LOCAL_MODEL_COST_MAP", "HF_HUB_OFFLINE"), "true"),
        "HAYSTACK_TELEMETRY_ENABLED": "false", "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1",
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "MLAFORGE_URL": f"{url}/v1", "MLAFORGE_MODEL": "m",
    }  # fmt: skip
    version, errors = results[name, model] = client.run(command, **environment)
    expected = {case for client, other, case in EXPECTED if (client, other) == (name, model)}
    failed = {case: error for case, error in errors.items() if error is not None}
    assert set(failed) == expected, (version, failed)

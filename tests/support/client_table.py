"""The client libraries that tests/clients runs: program, environment, configuration; and a table of what works."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "clients" / "programs"
# Most seconds that one program may take, on a busy machine too.
TIMEOUT = 600


@dataclasses.dataclass(frozen=True)
class Client:
    """A client library. `environment` is a folder of MLAFORGE_CLIENTS, or "node"; `setup` the lines that configure
    it."""

    program: str
    environment: str
    setup: tuple[str, str]
    arguments: tuple[str, ...] = ()

    def command(self, environments: Path) -> list[str] | None:
        """Return the command of its program, or None where the interpreter or the packages are not installed."""
        if self.environment == "node":
            node = shutil.which("node")
            interpreter = Path(node) if node and (PROGRAMS.parent / "node_modules").is_dir() else None
        else:
            python = environments / self.environment / "bin" / "python"
            interpreter = python if python.exists() else None
        return interpreter and [str(interpreter), str(PROGRAMS / self.program), *self.arguments]

    def run(self, command: list[str], folder: Path, **environment: str) -> tuple[str, dict[str, str | None]]:
        """Run the program in a folder, its home; return the client's version, and each case with its error or None."""
        done = subprocess.run(
            command,
            env={"HOME": str(folder), **environment},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        first, *lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, done.stdout + done.stderr
        return first["client"], {line["case"]: line["error"] for line in lines}


URL = "http://127.0.0.1:8000/v1"
CLIENTS = {
    "openai": Client("openai_python.py", "openai3", (
        f'client = OpenAI(base_url="{URL}", api_key="none")',
        'client.chat.completions.create(model="NAME", messages=[...])',
    )),
    "openai-node": Client("openai_node.mjs", "node", (
        f'const client = new OpenAI({{ baseURL: "{URL}", apiKey: "none" }});',
        'await client.chat.completions.create({ model: "NAME", messages: [...] });',
    )),
    "openai-agents": Client("openai_agents.py", "openai3", (
        f'set_default_openai_client(AsyncOpenAI(base_url="{URL}", api_key="none"), use_for_tracing=False)',
        'Agent(name="a", model="NAME")',
    )),
    "pydantic-ai": Client("pydantic_ai_client.py", "openai3", (
        f'provider = OpenAIProvider(base_url="{URL}", api_key="none")',
        'Agent(OpenAIChatModel("NAME", provider=provider))',
    )),
    "langchain": Client("langchain_client.py", "openai3", (
        f'model = ChatOpenAI(model="NAME", base_url="{URL}", api_key="none")',
        "model.invoke(...)",
    )),
    "litellm": Client("litellm_client.py", "openai3", (
        f'options = {{"api_base": "{URL}", "api_key": "none"}}',
        'completion(model="hosted_vllm/NAME", messages=[...], **options)',
    )),
    "instructor": Client("instructor_client.py", "openai2", (
        f'client = from_openai(OpenAI(base_url="{URL}", api_key="none"), mode=Mode.JSON_SCHEMA)',
        'client.chat.completions.create(model="NAME", response_model=..., messages=[...])',
    )),
    "llama-index": Client("llama_index_client.py", "openai2", (
        f'llm = OpenAILike(model="NAME", api_base="{URL}", api_key="none",',
        "                 is_chat_model=True, is_function_calling_model=True)",
    )),
    "smolagents": Client("smolagents_client.py", "openai3", (
        f'model = OpenAIModel("NAME", api_base="{URL}", api_key="none")',
        "ToolCallingAgent([...], model)",
    )),
    "llm": Client("llm_client.py", "openai3", (
        f"extra-openai-models.yaml: {{model_id: m, model_name: NAME, api_base: {URL}, supports_schema: true}}",
        "llm -m m ...",
    )),
    "dspy": Client("dspy_client.py", "openai3", (
        f'lm = dspy.LM("lm_studio/NAME", api_base="{URL}", api_key="none")',
        "dspy.configure(lm=lm, adapter=dspy.JSONAdapter())",
    )),
    "autogen": Client("autogen_client.py", "openai3", (
        f'OpenAIChatCompletionClient(model="NAME", base_url="{URL}", api_key="none",',
        '                           model_info={"function_calling": True, "structured_output": True, ...})',
    )),
    "haystack": Client("haystack_client.py", "openai3", (
        'key = Secret.from_token("none")',
        f'OpenAIChatGenerator(model="NAME", api_base_url="{URL}", api_key=key)',
    )),
    "ai-sdk-openai": Client("ai_sdk.mjs", "node", (
        f'const openai = createOpenAI({{ baseURL: "{URL}", apiKey: "none" }});',
        'generateText({ model: openai("NAME"), prompt: ... })',
    ), ("@ai-sdk/openai",)),
    "ai-sdk-openai-compatible": Client("ai_sdk.mjs", "node", (
        f'const m = createOpenAICompatible({{ name: "m", baseURL: "{URL}", supportsStructuredOutputs: true }});',
        'generateText({ model: m("NAME"), prompt: ... })',
    ), ("@ai-sdk/openai-compatible",)),
    "anthropic": Client("anthropic_client.py", "openai3", (
        'client = Anthropic(base_url="http://127.0.0.1:8000", api_key="none")',
        'client.messages.create(model="NAME", max_tokens=64, messages=[...])',
    )),
    "schemathesis": Client("schemathesis_client.py", "openai3", (
        "st run http://127.0.0.1:8000/openapi.json --phases examples,fuzzing \\",
        "  --checks not_a_server_error,status_code_conformance",
    )),
}  # fmt: skip


def markdown(results: dict[tuple[str, str], tuple[str, dict[str, str | None]]], models: Sequence[str]) -> str:
    """Return the table of clients as Markdown, and the lines that configure them.

    results  (client, model) -> version and errors of cases
    """
    lines = [f"| client | version | {' | '.join(models)} |", "|---" * (len(models) + 2) + "|"]
    setups = []
    for name, client in CLIENTS.items():
        runs = [results.get((name, model)) for model in models]
        version = next((run[0] for run in runs if run), None)
        if version is not None:
            lines.append(f"| {name} | {version} | {' | '.join(map(_cell, runs))} |")
            setups += [f"{name}:", "", *(f"    {line}" for line in client.setup), ""]
    return "\n".join([*lines, "", *setups])


def _cell(result: tuple[str, dict[str, str | None]] | None) -> str:
    if result is None:
        return ""
    _, errors = result
    failed = [case for case, error in errors.items() if error is not None]
    works = f"{len(errors) - len(failed)} of {len(errors)}"
    return f"{works}; not {', '.join(failed)}" if failed else works

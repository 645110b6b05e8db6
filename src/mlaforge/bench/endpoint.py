"""Any other engine as a peer: a file's command starts it, requests go to its OpenAI endpoint.

The file, YAML (docs/bench.md shows vLLM, llama.cpp, SGLang and TensorRT-LLM):

    name: vllm                      how results call it
    command: vllm serve {model} --port {port} --max-model-len {longest}
    environment: {OMP_NUM_THREADS: "2"}      on top of ours
    url: http://127.0.0.1:{port}/v1          the default; without a command: an endpoint that runs already
    model: "{model}"                its name in the API
    dtype: bfloat16                 for the roof
    start_seconds: 600              how long starting may take
    body: {ignore_eos: true}        more fields of every request
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlaforge.artifact import record_text
from mlaforge.bench.peer import Repetition, Variant
from mlaforge.config import Options, option, resolve
from mlaforge.runtime import UserError, log


@dataclasses.dataclass(frozen=True)
class EndpointConfig(Options):
    """A peer's file; `environment` and `body` are mappings beside these keys."""

    name: str = option("endpoint", "how results call it")
    command: str | None = option(None, "what starts it")
    url: str = option("http://127.0.0.1:{port}/v1", "where it answers")
    model: str = option("{model}", "its name in the API")
    dtype: str = option("bfloat16", "of its weights, for the roof")
    start_seconds: int = option(600, "how long starting may take", "seconds", least=1)


class PeerFailed(Exception):
    """A peer's process ended or answered with an error; the rest of the run goes on without it."""


class Endpoint:
    """A server that was started for this run, or runs already. The same prompts as token ids, temperature 0."""

    weight_bytes: int | None = None

    def __init__(self, file: Path, directory: Path, model: str, longest: int, most: int):
        recipe = _read(file)
        self.body: dict[str, Any] = recipe.pop("body")
        environment: dict[str, Any] = recipe.pop("environment")
        try:
            self.config = resolve(EndpointConfig, None, **recipe)
        except UserError as error:
            raise UserError(f"{file}: {error}") from error
        port = _free_port()
        words = {"model": str(directory), "name": model, "port": str(port), "longest": str(longest), "most": str(most)}
        self.name, self.model, self.dtype = self.config.name, model, self.config.dtype
        self.url, self.api_name = _filled(self.config.url, words), _filled(self.config.model, words)
        self.process: subprocess.Popen[bytes] | None = None
        # Seen when it fails; a pipe that nobody reads would stop it. Open for as long as the server runs: see close.
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            if self.config.command:
                command = [_filled(word, words) for word in shlex.split(self.config.command)]
                variables = {str(key): str(value) for key, value in environment.items()}
                try:
                    self.process = subprocess.Popen(
                        command, env={**os.environ, **variables}, stdout=self.output, stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )  # fmt: skip
                except OSError as error:
                    raise UserError(f"{file}: {command[0]} cannot be started: {error.strerror}") from error
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        import httpx

        log(f"{self.name}: waiting for {self.url}")
        end = time.monotonic() + self.config.start_seconds
        while time.monotonic() < end:
            if self.process is not None and self.process.poll() is not None:
                raise PeerFailed(f"{self.name} ended with {self.process.returncode} while starting: {self._tail()}")
            try:
                if httpx.get(f"{self.url}/models", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1 if self.process is not None else 1.0)
        raise PeerFailed(f"{self.name} does not answer at {self.url} after {self.config.start_seconds} s")

    def _tail(self) -> str:
        self.output.seek(0)
        return record_text(" ".join(self.output.read().decode(errors="replace").split()))[-400:]

    def close(self) -> None:
        """Ends what was started, all of its processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.output.close()

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        """As Peer.run. The requests come at once; what is counted begins when all of them have their first token."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            streams = list(pool.map(lambda prompt: self._one(prompt, tokens + 1), prompts))
        began = max(times[0] for times, _ in streams)
        decoded, gaps = 0, []
        for times, total in streams:
            # A piece of a stream may hold several tokens, and servers do not say how many.
            per_piece = total / len(times)
            after = [at for at in times if at > began]
            decoded += round(per_piece * len(after))
            between = [(b - a) / per_piece for a, b in itertools.pairwise([began, *after])]
            gaps += [gap for gap in between for _ in range(round(per_piece))]
        seconds = max(times[-1] for times, _ in streams) - began
        if not decoded or seconds <= 0:
            raise PeerFailed(f"{self.name} sent all tokens at once; it must stream")
        return Repetition(began - start, decoded, seconds, gaps, [])

    def _one(self, prompt: list[int], count: int) -> tuple[list[float], int]:
        """When the pieces of an answer came, and how many tokens it had."""
        import httpx

        body = {
            "model": self.api_name, "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **self.body,
        }  # fmt: skip
        times: list[float] = []
        usage: dict[str, Any] = {}
        try:
            with httpx.stream("POST", f"{self.url}/completions", json=body, timeout=600) as answer:
                if answer.status_code != 200:
                    raise PeerFailed(f"{self.name}: status {answer.status_code}: {answer.read()[:300]!r}")
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("choices"):
                        times.append(time.perf_counter())
                    usage = event.get("usage") or usage
        except httpx.HTTPError as error:
            raise PeerFailed(f"{self.name}: {error!r}: {self._tail()}") from error
        completion_tokens = usage.get("completion_tokens", len(times))
        if completion_tokens != count or not times:
            raise PeerFailed(
                f"{self.name} made {completion_tokens} of {count} tokens; it must go on past the end of a text (body)"
            )
        return times, count


def _read(file: Path) -> dict[str, Any]:
    """The keys of a peer's file, `environment` and `body` always among them. UserError where it is wrong."""
    from mlaforge.config import read_recipe

    recipe = read_recipe(file)
    for key, default in (("environment", {}), ("body", {"ignore_eos": True})):
        value = recipe.setdefault(key, default)
        if not isinstance(value, dict):
            raise UserError(f"{file}: {key} must hold `key: value` lines, not {value!r}")
    if "command" not in recipe and "url" not in recipe:
        raise UserError(f"{file} needs a command that starts the engine, or the url of one that runs")
    return recipe


def _filled(text: str, words: dict[str, str]) -> str:
    """`text` with {model} and the like replaced; other braces stay, a command may hold JSON."""
    for word, value in words.items():
        text = text.replace(f"{{{word}}}", value)
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

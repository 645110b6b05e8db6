"""Any other engine as a peer: a YAML file's command starts it and its OpenAI endpoint serves the requests.

The file (docs/bench.md shows vLLM, llama.cpp, SGLang and TensorRT-LLM):

    name: vllm                      name in results
    command: vllm serve {model} --port {port} --max-model-len {longest}
    environment: {OMP_NUM_THREADS: "2"}      added to this process's environment
    url: http://127.0.0.1:{port}/v1          the default; without a command: a running endpoint
    model: "{model}"                model name in the API
    dtype: bfloat16                 dtype of the weights, for the roofline
    start_seconds: 600              timeout of the start
    body: {ignore_eos: true}        extra fields of every request
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
    """Keys of a peer's file, besides the mappings `environment` and `body`."""

    name: str = option("endpoint", "name in results")
    command: str | None = option(None, "command that starts the server")
    url: str = option("http://127.0.0.1:{port}/v1", "base URL of the API")
    model: str = option("{model}", "model name in the API")
    dtype: str = option("bfloat16", "dtype of the weights, for the roofline")
    start_seconds: int = option(600, "timeout of the start", "seconds", least=1)


class PeerFailed(Exception):
    """A peer's process ended or answered with an error; the run continues without it."""


class Endpoint:
    """An OpenAI-compatible server, started for this run or running already. Prompts are sent as token ids,
    temperature 0. max_length and max_batch: values of {longest} and {most} in the file."""

    weight_bytes: int | None = None

    def __init__(self, file: Path, directory: Path, model: str, max_length: int, max_batch: int):
        recipe = _read(file)
        self.body: dict[str, Any] = recipe.pop("body")
        environment: dict[str, Any] = recipe.pop("environment")
        try:
            self.config = resolve(EndpointConfig, None, **recipe)
        except UserError as error:
            raise UserError(f"{file}: {error}") from error
        port = _free_port()
        values = {
            "model": str(directory), "name": model, "port": str(port), "longest": str(max_length),
            "most": str(max_batch),
        }  # fmt: skip
        self.name, self.model, self.dtype = self.config.name, model, self.config.dtype
        self.url, self.api_name = _substitute(self.config.url, values), _substitute(self.config.model, values)
        self.process: subprocess.Popen[bytes] | None = None
        # Output for error messages; an unread pipe would block the server. `close` closes it with the server.
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            if self.config.command:
                command = [_substitute(word, values) for word in shlex.split(self.config.command)]
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
        """Terminate the started server and its child processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.output.close()

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        """See Peer.run. All requests are sent at once; timing begins when all of them have their first token."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            streams = list(pool.map(lambda prompt: self._complete(prompt, tokens + 1), prompts))
        decode_start = max(times[0] for times, _ in streams)
        decoded, token_seconds = 0, []
        for times, total in streams:
            # A chunk of a stream may hold several tokens; servers do not report how many.
            per_chunk = total / len(times)
            later = [at for at in times if at > decode_start]
            decoded += round(per_chunk * len(later))
            intervals = [(b - a) / per_chunk for a, b in itertools.pairwise([decode_start, *later])]
            token_seconds += [seconds for seconds in intervals for _ in range(round(per_chunk))]
        seconds = max(times[-1] for times, _ in streams) - decode_start
        if not decoded or seconds <= 0:
            raise PeerFailed(f"{self.name} sent all tokens at once; it must stream")
        return Repetition(decode_start - start, decoded, seconds, token_seconds, [])

    def _complete(self, prompt: list[int], count: int) -> tuple[list[float], int]:
        """Stream one completion. Return the arrival times of its chunks and the number of its tokens."""
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
                f"{self.name} generated {completion_tokens} of {count} tokens; it must ignore EOS (see `body`)"
            )
        return times, count


def _read(file: Path) -> dict[str, Any]:
    """Read a peer's file and add default `environment` and `body`. Raise UserError for an invalid file."""
    from mlaforge.config import read_recipe

    recipe = read_recipe(file)
    for key, default in (("environment", {}), ("body", {"ignore_eos": True})):
        value = recipe.setdefault(key, default)
        if not isinstance(value, dict):
            raise UserError(f"{file}: {key} must hold `key: value` lines, not {value!r}")
    if "command" not in recipe and "url" not in recipe:
        raise UserError(f"{file} needs a command that starts the engine, or the url of a running one")
    return recipe


def _substitute(text: str, values: dict[str, str]) -> str:
    """Replace {model} and the other placeholders; other braces stay, as a command may contain JSON."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""Fuzzed requests against a real server: each gets an answer or a refusal in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from attack import fuzz
from attack.ledger import Ledger
from attack.served import Served

# Requests at the same time.
CLIENTS = 16
# Seconds after which an answer that is not long does not come any more.
LONGEST = 120.0
REFUSALS = range(400, 500)


class Fault(Exception):
    """What the server may not do. The text says what it did."""


async def run(ledger: Ledger, served: Served, count: int) -> dict[str, Any]:
    numbers = iter(range(count))

    async def one_client() -> None:
        for number in numbers:
            await one(ledger, served, number)

    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    if held := await served.settled():
        ledger.fail(None, "held", f"after the last request: {held}")
    return {}


async def one(ledger: Ledger, served: Served, number: int) -> None:
    request = fuzz.draw(ledger.dice(number))
    kind, why, outcome = request.kind.split(":")[0], "", "fell with its server"
    async with served.replacing:
        life, client = served.life, served.client
    with served.attacked_by(f"{ledger.part}-{number} {request.kind}"):
        try:
            outcome = await asyncio.wait_for(send(client, request), request.leave or LONGEST)
        except TimeoutError:
            outcome = "left by its client"
            if request.leave is None:
                why = f"no whole answer within {LONGEST:g} s"
        except Fault as fault:
            outcome, why = "fault", str(fault)
        except httpx.HTTPError as error:
            outcome, why = "lost", f"the connection broke: {error!r}"
    if why or outcome == "503":
        await served.look()
    if served.life != life:
        outcome, why = "fell with its server", ""
    ledger.ended_as(number, kind, outcome, request.kind)
    if why:
        text = f"{request.method} {request.path} HTTP/1.1\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in request.headers.items()
        )
        raw = text.encode() + f"content-length: {len(request.body)}\r\n\r\n".encode() + request.body
        ledger.fail(number, request.kind, why, {"request.http": raw})


async def send(client: httpx.AsyncClient, request: fuzz.Request) -> str:
    """How it was answered, in a word. Raises Fault."""
    outgoing = client.build_request(request.method, request.path, content=request.body, headers=request.headers)
    answer = await client.send(outgoing, stream=True)
    try:
        await answer.aread()
    finally:
        await answer.aclose()
    status = answer.status_code
    if request.expected and status not in (*request.expected, 429, 503):
        raise Fault(f"status {status} instead of {request.expected}: {answer.text[:300]}")
    if status == 503 and "retry-after" not in answer.headers:
        raise Fault(f"status 503 without Retry-After: {answer.text[:300]}")
    if status >= 500 and status != 503:
        raise Fault(f"status {status}: {answer.text[:300]}")
    if "Traceback" in answer.text:
        raise Fault(f"a traceback in the answer: {answer.text[-300:]}")
    if status in REFUSALS or status == 503:
        if request.method != "HEAD":
            _check_refusal(answer, anthropic=request.path.rstrip("/").startswith(fuzz.MESSAGES))
    elif status == 200 and request.method == "POST" and "completions" in request.path:
        _check_answer(answer)
    elif status == 200 and request.method == "POST" and request.path in (fuzz.RESPONSES, fuzz.MESSAGES):
        _check_typed_answer(answer)
    return str(status)


def _check_refusal(answer: httpx.Response, anthropic: bool) -> None:
    try:
        error = answer.json()["error"]
        names = set(error) - {"details"} if anthropic else set(error) - {"param", "code"}
        right = names == {"message", "type"} and error["message"] and error["type"]
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise Fault(f"a refusal ({answer.status_code}) that is not in the shape of its API: {answer.text[:300]}")
    if len(answer.content) > 5000:
        raise Fault(f"a refusal of {len(answer.content)} bytes: {answer.text[:300]}")


def _check_answer(answer: httpx.Response) -> None:
    """A whole answer is whole; a stream ends with [DONE], and its events are JSON without an error."""
    if "text/event-stream" not in answer.headers.get("content-type", ""):
        if not answer.json().get("choices"):
            raise Fault(f"an answer without choices: {answer.text[:300]}")
        return
    events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise Fault(f"a stream that does not end with [DONE]: {answer.text[-300:]}")
    for event in events[:-1]:
        if "error" in json.loads(event):
            raise Fault(f"an error in a stream: {event[:300]}")


def _check_typed_answer(answer: httpx.Response) -> None:
    """The last event of a stream says how the answer ended."""
    if "text/event-stream" not in answer.headers.get("content-type", ""):
        if not answer.json().get("id"):
            raise Fault(f"an answer without an id: {answer.text[:300]}")
        return
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: ")]
    if not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "message_stop"):
        raise Fault(f"a stream that does not end: {answer.text[-300:]}")

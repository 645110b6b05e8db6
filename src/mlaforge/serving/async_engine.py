"""AsyncEngine: the synchronous engine in a thread, driven from one event loop.

The thread takes commands from a queue, on which it blocks while the engine has no work. It appends outputs to an outbox
and wakes the loop once per batch of steps. Outputs that a reader has not fetched are merged into one per request, so
that a slow reader needs no more memory than its whole response.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

from mlaforge.engine.request.output import RequestOutput, merge
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.stats import EngineStats
from mlaforge.runtime import UserError

# Time limit for the commands between two steps; at least one command is executed.
COMMAND_SECONDS = 0.02
# Time for which `close` waits for the running step.
CLOSE_SECONDS = 10.0


class SyncEngine(Protocol):
    """The engine interface of the server. All methods except the tokenizer's and `check_grammar` are called from one
    thread."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def model_name(self) -> str: ...
    @property
    def sampling_defaults(self) -> Mapping[str, Any]: ...
    @property
    def has_work(self) -> bool: ...
    def check_grammar(self, params: SamplingParams) -> None: ...
    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...


class EngineUnavailable(RuntimeError):
    """The engine accepts or continues no request: its thread died (the cause is chained), or it is shutting down."""


class Stream:
    """Outputs of the engine requests of one HTTP request: `async with` it, then iterate.

    Leaving it aborts the unfinished requests. Iteration and `complete` raise UserError if the engine refused or failed
    a request, EngineUnavailable if the engine stopped.
    """

    def __init__(self, engine: AsyncEngine, requests: Requests, arrived: float) -> None:
        self.arrived = arrived  # seconds of time.perf_counter()
        self._engine = engine
        self._order = list(requests)
        # Requests that the engine does not have yet, and the number of continuations of those that it has.
        self._waiting = dict(requests)
        self._submitted: dict[str, int] = {}
        self._unanswered: set[str] = set()
        self._open = set(requests)
        self._pending: dict[str, RequestOutput] = {}
        self._error: UserError | EngineUnavailable | None = None
        self._updated = asyncio.Event()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine._abort(self._open)
        self._open, self._waiting = set(), {}
        self._pending = {}

    async def _wait(self) -> None:
        self._updated.clear()
        await self._updated.wait()

    async def accepted(self) -> None:
        """Wait until the engine has accepted the first requests. All of them share the parameters that it may
        refuse."""
        while self._unanswered and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def complete(self) -> list[RequestOutput]:
        """Return the complete output of every request, in the order of the requests."""
        while self._open and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        return [self._pending.pop(request_id) for request_id in self._order]

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            await self._wait()
        return self._pending.pop(next(iter(self._pending)))

    def _next(self, share: int) -> Iterator[tuple[str, list[int], SamplingParams]]:
        """Yield requests to submit until the engine has `share` continuations of this stream, or one request."""
        while self._waiting and self._error is None:
            request_id, (prompt_ids, params) = next(iter(self._waiting.items()))
            if self._submitted and sum(self._submitted.values()) + params.n > share:
                return
            del self._waiting[request_id]
            self._submitted[request_id] = params.n
            self._unanswered.add(request_id)
            yield request_id, prompt_ids, params

    def _put(self, request_id: str, event: RequestOutput | UserError | None) -> None:
        """`event`: an output of the request, the reason of its refusal, or None for its acceptance."""
        self._unanswered.discard(request_id)
        if isinstance(event, UserError) or (event is not None and event.finished):
            del self._submitted[request_id]
        if isinstance(event, UserError):
            self._open.discard(request_id)
            self._error = self._error or event
        elif event is not None:
            unread = self._pending.get(request_id)
            self._pending[request_id] = event if unread is None else merge(unread, event)
            if event.finished:
                self._open.discard(request_id)
            if self._error is None:
                try:
                    event.raise_for_error()
                except UserError as error:
                    self._error = error
        self._updated.set()

    def _fail(self, error: EngineUnavailable) -> None:
        self._error = self._error or error
        self._updated.set()


# (arrival of the stream, output, end of its step): both times in seconds of time.perf_counter().
Observer = Callable[[float, RequestOutput, float], None]
# Id -> prompt and parameters.
Requests = Mapping[str, tuple[list[int], SamplingParams]]
_Command = tuple[str, list[int], SamplingParams] | str | None
_Event = tuple[str, RequestOutput | UserError | None, float]


class AsyncEngine:
    """An engine, its thread and its streams, used from one event loop: the first that opens a stream.

    `stats` is the engine's state after its last step. `on_output` is called with every output, read or not. The engine
    has at most `share` continuations of a stream at a time, or one request, so that a client's thousands of prompts
    neither delay others nor are added between two steps.
    """

    def __init__(self, engine: SyncEngine, share: int = 32) -> None:
        self.engine, self._share = engine, share
        self.stats = engine.stats()
        self.on_output: Observer | None = None
        # The reason why requests are refused, if they are.
        self.unavailable: EngineUnavailable | None = None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._outbox: list[_Event] = []
        self._outbox_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="mlaforge-engine", daemon=True)
        self._no_streams: asyncio.Event | None = None
        # Start of the current step (time.perf_counter()); None while the thread waits for commands.
        self._busy_since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Seconds since the last step ended or the engine got work; 0 without work."""
        since = self._busy_since
        return 0.0 if since is None else time.perf_counter() - since

    def start(self) -> None:
        """Start the thread, once; called inside the event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._no_streams = asyncio.Event()
            self._no_streams.set()
            self._thread.start()

    def open(self, requests: Requests, arrived: float | None = None) -> Stream:
        """Submit requests to the engine. Raises EngineUnavailable."""
        self.start()
        assert self._no_streams is not None
        if self.unavailable is not None:
            raise self.unavailable
        assert not self._streams.keys() & requests.keys(), "request ids must be unique"
        stream = Stream(self, requests, time.perf_counter() if arrived is None else arrived)
        self._streams.update(dict.fromkeys(requests, stream))
        self._no_streams.clear()
        self._submit(stream)
        return stream

    def _submit(self, stream: Stream) -> None:
        for command in stream._next(self._share):
            self._commands.put(command)

    async def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """Yield the incremental outputs of one request. Raises UserError and EngineUnavailable."""
        async with self.open({request_id: (prompt_ids, params)}) as stream:
            async for output in stream:
                yield output

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait at most `timeout` seconds for the running ones; the remaining ones end with
        EngineUnavailable. Returns whether all had finished."""
        self.unavailable = self.unavailable or EngineUnavailable("the server is shutting down")
        if self._no_streams is None:
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._no_streams.wait()
        except TimeoutError:
            for stream in set(self._streams.values()):
                stream._fail(self.unavailable)
            return False
        return True

    def close(self) -> None:
        """Stop the thread after its current step, or abandon it if that takes longer than CLOSE_SECONDS; waiting
        streams end with EngineUnavailable."""
        self.unavailable = self.unavailable or EngineUnavailable("the engine was closed")
        if self._thread.ident is not None:
            self._commands.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _abort(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
            self._commands.put(request_id)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._streams:
            assert self._no_streams is not None
            self._no_streams.set()

    # The methods before `_deliver` run in the thread.

    def _run(self) -> None:
        try:
            while self._execute_commands():
                outputs = self.engine.step() if self.engine.has_work else []
                self.stats = self.engine.stats()
                self._busy_since = time.perf_counter()
                if outputs:
                    now = time.perf_counter()
                    self._post([(output.request_id, output, now) for output in outputs])
        finally:
            # threading.excepthook prints the error.
            error = sys.exception()
            assert self._loop is not None
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._end, error)

    def _execute_commands(self) -> bool:
        """Execute queued commands for about COMMAND_SECONDS, so that decoding is not delayed; block while the engine
        has no work. Returns False if the thread has to end."""
        idle, start = not self.engine.has_work, time.perf_counter()
        while True:
            if not idle and time.perf_counter() - start > COMMAND_SECONDS and self.engine.has_work:
                return True
            if idle:
                self._busy_since = None
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if idle:
                self._busy_since = start = time.perf_counter()
            idle = False
            if command is None:
                return False
            if isinstance(command, str):
                self.engine.abort(command)
                continue
            request_id, prompt_ids, params = command
            refusal = None
            try:
                self.engine.add(request_id, prompt_ids, params)
            except UserError as error:
                refusal = error
            self._post([(request_id, refusal, time.perf_counter())])

    def _post(self, events: list[_Event]) -> None:
        with self._outbox_lock:
            was_empty = not self._outbox
            self._outbox += events
        assert self._loop is not None
        if was_empty and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    # The methods below run in the event loop.

    def _deliver(self) -> None:
        with self._outbox_lock:
            events, self._outbox = self._outbox, []
        for request_id, event, seconds in events:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream._put(request_id, event)
            if isinstance(event, RequestOutput) and self.on_output is not None:
                self.on_output(stream.arrived, event, seconds)
            if isinstance(event, UserError) or (event is not None and event.finished):
                self._forget(request_id)
                self._submit(stream)

    def _end(self, error: BaseException | None) -> None:
        self._deliver()
        if error is not None:
            self.unavailable = EngineUnavailable(f"the engine failed: {type(error).__name__}")
            self.unavailable.__cause__ = error
        assert self.unavailable is not None
        for stream in set(self._streams.values()):
            stream._fail(self.unavailable)

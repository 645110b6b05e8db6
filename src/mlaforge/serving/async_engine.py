"""The synchronous engine in one thread, seen from one event loop.

Commands go to the thread by a queue, on which it sleeps while the engine has no work. Outputs come back in batches: the
thread appends to an outbox and wakes the loop once, however many steps pass before the loop gets to it. What a reader
has not fetched yet is merged into one output per request, so that a slow reader costs at most its own answer.
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

# Requests that come and go between two steps take so long at most, or one of them.
COMMAND_SECONDS = 0.02
# How long `close` waits for the step that runs.
CLOSE_SECONDS = 10.0


class SyncEngine(Protocol):
    """What the server needs of an engine. All methods but the tokenizer's and `check_grammar` are called in one
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
    """The engine takes or continues no request: its thread died (the cause is chained), or it is shutting down."""


class Stream:
    """Outputs of requests that belong together: `async with` it, then iterate.

    Leaving it, by whatever way, aborts the requests that are not finished. Iteration and `complete` raise UserError
    where the engine refused one of them or gave it up, EngineUnavailable where the engine ended first.
    """

    def __init__(self, owner: AsyncEngine, requests: Requests, arrived: float) -> None:
        self.arrived = arrived  # seconds of time.perf_counter()
        self._owner = owner
        self._order = list(requests)
        # Those that the engine does not have yet, and how many continuations it has of the others.
        self._waiting = dict(requests)
        self._held: dict[str, int] = {}
        self._unanswered: set[str] = set()
        self._open = set(requests)
        self._pending: dict[str, RequestOutput] = {}
        self._error: UserError | EngineUnavailable | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner._leave(self._open)
        self._open, self._waiting = set(), {}
        self._pending = {}

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def accepted(self) -> None:
        """Returns once the engine has taken the first of the requests. What it may refuse, they have in common."""
        while self._unanswered and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def complete(self) -> list[RequestOutput]:
        """Every request's whole answer, in the order in which they were given."""
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
        """Those that are given to the engine now, so that it has at most `share` continuations, or one request."""
        while self._waiting and self._error is None:
            request_id, (prompt_ids, params) = next(iter(self._waiting.items()))
            if self._held and sum(self._held.values()) + params.n > share:
                return
            del self._waiting[request_id]
            self._held[request_id] = params.n
            self._unanswered.add(request_id)
            yield request_id, prompt_ids, params

    def _put(self, request_id: str, note: RequestOutput | UserError | None) -> None:
        """`note`: news of a request, why it was refused, or None when it was taken."""
        self._unanswered.discard(request_id)
        if isinstance(note, UserError) or (note is not None and note.finished):
            del self._held[request_id]
        if isinstance(note, UserError):
            self._open.discard(request_id)
            self._error = self._error or note
        elif note is not None:
            old = self._pending.get(request_id)
            self._pending[request_id] = note if old is None else merge(old, note)
            if note.finished:
                self._open.discard(request_id)
            if self._error is None:
                try:
                    note.raise_for_error()
                except UserError as error:
                    self._error = error
        self._news.set()

    def _fail(self, error: EngineUnavailable) -> None:
        self._error = self._error or error
        self._news.set()


# (stream's arrival, output, when its step ended): both times in seconds of time.perf_counter().
Observer = Callable[[float, RequestOutput, float], None]
# Id -> prompt and parameters.
Requests = Mapping[str, tuple[list[int], SamplingParams]]
_Command = tuple[str, list[int], SamplingParams] | str | None
_Note = tuple[str, RequestOutput | UserError | None, float]


class AsyncEngine:
    """One engine, its thread, and the streams that wait for it. Used from one event loop, the first that opens one.

    `stats` is the engine's state after its last step. `on_output` sees every output as it comes, read or not. Of one
    stream the engine has at most `share` continuations at a time, or one request: thousands of prompts of one client
    neither fill the queue before everybody else nor are taken in one go.
    """

    def __init__(self, engine: SyncEngine, share: int = 32) -> None:
        self.engine, self._share = engine, share
        self.stats = engine.stats()
        self.on_output: Observer | None = None
        # Why no request is taken any more; None while all is well.
        self.unavailable: EngineUnavailable | None = None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._outbox: list[_Note] = []
        self._outbox_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="mlaforge-engine", daemon=True)
        self._no_streams: asyncio.Event | None = None
        # Since when the thread is at what it does now (time.perf_counter()); None while it sleeps.
        self._busy_since: float | None = None

    @property
    def busy(self) -> float:
        """Seconds since a step ended, or since there was work again; 0 where there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.perf_counter() - since

    def start(self) -> None:
        """Starts the thread; called inside the event loop. Again: nothing happens."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._no_streams = asyncio.Event()
            self._no_streams.set()
            self._thread.start()

    def open(self, requests: Requests, arrived: float | None = None) -> Stream:
        """Gives requests to the engine. Raises EngineUnavailable."""
        self.start()
        assert self._no_streams is not None
        if self.unavailable is not None:
            raise self.unavailable
        assert not self._streams.keys() & requests.keys(), "request ids must be unique"
        stream = Stream(self, requests, time.perf_counter() if arrived is None else arrived)
        self._streams.update(dict.fromkeys(requests, stream))
        self._no_streams.clear()
        self._give(stream)
        return stream

    def _give(self, stream: Stream) -> None:
        for command in stream._next(self._share):
            self._commands.put(command)

    async def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """One request's outputs, each only what is new. Raises UserError and EngineUnavailable."""
        async with self.open({request_id: (prompt_ids, params)}) as stream:
            async for output in stream:
                yield output

    async def drain(self, timeout: float) -> bool:
        """Takes no more requests and waits for the running ones, `timeout` seconds at most; those that remain then
        end with EngineUnavailable. Returns whether all had finished."""
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
        """Ends the thread after its current step, and leaves it behind where that does not end; waiting streams end
        with EngineUnavailable."""
        self.unavailable = self.unavailable or EngineUnavailable("the engine was closed")
        if self._thread.ident is not None:
            self._commands.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _leave(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
            self._commands.put(request_id)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._streams:
            assert self._no_streams is not None
            self._no_streams.set()

    # Everything below up to `_deliver` runs in the thread.

    def _run(self) -> None:
        try:
            while self._obey():
                outputs = self.engine.step() if self.engine.has_work else []
                self.stats = self.engine.stats()
                self._busy_since = time.perf_counter()
                if outputs:
                    now = time.perf_counter()
                    self._post([(output.request_id, output, now) for output in outputs])
        finally:
            # The error itself goes on to threading.excepthook, which prints it.
            error = sys.exception()
            assert self._loop is not None
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._end, error)

    def _obey(self) -> bool:
        """Carries out what was asked, but no more than those who decode hardly notice; sleeps while there is nothing to
        do. False: the thread is to end."""
        idle, begin = not self.engine.has_work, time.perf_counter()
        while True:
            if not idle and time.perf_counter() - begin > COMMAND_SECONDS and self.engine.has_work:
                return True
            if idle:
                self._busy_since = None
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if idle:
                self._busy_since = begin = time.perf_counter()
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

    def _post(self, notes: list[_Note]) -> None:
        with self._outbox_lock:
            asleep = not self._outbox
            self._outbox += notes
        assert self._loop is not None
        if asleep and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    # The loop's side again.

    def _deliver(self) -> None:
        with self._outbox_lock:
            notes, self._outbox = self._outbox, []
        for request_id, note, when in notes:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream._put(request_id, note)
            if isinstance(note, RequestOutput) and self.on_output is not None:
                self.on_output(stream.arrived, note, when)
            if isinstance(note, UserError) or (note is not None and note.finished):
                self._forget(request_id)
                self._give(stream)

    def _end(self, error: BaseException | None) -> None:
        self._deliver()
        if error is not None:
            self.unavailable = EngineUnavailable(f"the engine failed: {type(error).__name__}")
            self.unavailable.__cause__ = error
        assert self.unavailable is not None
        for stream in set(self._streams.values()):
            stream._fail(self.unavailable)

"""One call from its arrival to its one end: record, quota, model, engine requests, outputs.

Knows: callers, deadlines, records, the order of things in a call, which error ends it how.
Does not know: wires, how text is made. server/docs/errors.md says which layer owns which error.

A frontend makes a RequestContext of what it knows of a call, opens the call, and prints what the
call returns. A call may have several requests: a batch of prompts is one call.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast

from quill.server.auth.caller import ANYBODY, Caller, QuotaUsage, RateLimits
from quill.server.engine.dispatcher import Dispatcher, Engine
from quill.server.errors import (
    InvalidFieldError,
    RequestError,
    StepError,
    UnavailableError,
    UnsupportedError,
    rejection_of,
    status_name,
)
from quill.server.frontend.answer import Answer, Chunk, Result, merge
from quill.server.frontend.prompts import PromptReader, check_key_limit
from quill.server.frontend.reader import Arrival, RequestReader
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import EmbedSpec, GenerateSpec, ParsedRequest, renamed
from quill.server.request import Request
from quill.server.telemetry.call_record import Record, new_request_id
from quill.server.text.tokenizer import Text

logger = logging.getLogger(__name__)

Frontend = Literal["grpc", "http", "kserve"]
SendChunk = Callable[[Chunk], Awaitable[None]]
_Parameters = ParamSpec("_Parameters")
_Value = TypeVar("_Value")
_Spec = TypeVar("_Spec", GenerateSpec, EmbedSpec)

# A long message is read by another thread: nothing slower than a millisecond on the event loop.
MAX_INLINE_BYTES = 2048
MAX_INLINE_EMBEDDINGS = 8  # nor are more written there,
MAX_INLINE_TOKENS = 256  # nor answers about more
MAX_DETOKENIZED = 2**17  # tokens
# How long before a client's deadline a request is stopped: a share of its time, and at most.
MARGIN = 0.1
MAX_MARGIN_S = 0.1
ROUNDING = 0.01
SLACK_S = 0.01  # clocks are read at different moments


async def _ignore() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class RequestContext:
    """All that a frontend knows of a call beside its message."""

    method: str  # as the log and the metrics name it
    frontend: Frontend
    caller: Caller = ANYBODY
    deadline_s: float | None = None  # the client's own, on the engine's clock, time.monotonic
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str = field(default_factory=new_request_id)
    # Awaited for each request that the engine has accepted: it runs, or waits in the queue.
    on_accepted: Callable[[], Awaitable[None]] = _ignore
    place: str | None = None  # in the queue, that was reserved for the call's first request

    def record(self) -> Record:
        return Record(
            self.method,
            self.caller.name,
            self.request_id,
            frontend=self.frontend,
            trace_headers=self.trace_headers,
        )


def raising_context(
    make: Callable[_Parameters, AsyncIterator[_Value]],
) -> Callable[_Parameters, AbstractAsyncContextManager[_Value, None]]:
    """An asynccontextmanager that promises to raise where its body raised.

    So mypy knows that a method whose body returns a response always returns one.
    """
    return cast(
        "Callable[_Parameters, AbstractAsyncContextManager[_Value, None]]",
        asynccontextmanager(make),
    )


class Instance(Protocol):
    """A loaded model: what is served, and the engine that runs it."""

    @property
    def served(self) -> ServedModel: ...

    @property
    def engine(self) -> Engine: ...

    def call(self) -> AbstractContextManager[Any]:
        """For as long as a call relies on it."""


class Calls:
    """Opens calls, whichever frontend they come through. `report` gets each call's record."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        instance: Callable[[], Instance | None],
        report: Callable[[Record], None],
        limits: RateLimits | None = None,
        share_cache: bool = False,
    ) -> None:
        self.dispatcher = dispatcher
        self._instance = instance  # that serves now; None while the server loads
        self.limits = limits or RateLimits()
        self.share_cache = share_cache
        self.report = report
        self._num_open = 0
        self._changed_s = 0.0  # when a call began or ended

    @property
    def num_requests(self) -> int:
        """Running and waiting, of all frontends."""
        return len(self.dispatcher)

    def reserve(self, caller: Caller) -> str | None:
        """A place in the queue for a call whose request isn't read yet. Rejects a caller for whom
        there is none."""
        return self.dispatcher.admission.reserve(caller.name)

    def free(self, place: str | None) -> None:
        """Its call has none, needs none, or has ended, perhaps without a request for the engine."""
        if place is not None:
            self.dispatcher.admission.leave((), (place,))

    @raising_context
    async def open(self, context: RequestContext) -> AsyncIterator["Call"]:
        """A call on the model that serves now."""
        async with self.record(context) as record:
            instance = self._instance()
            if instance is None:
                reason = "the server is loading its model. Try again in a few seconds"
                raise UnavailableError(reason, "loading")
            record.model = instance.served.name
            with instance.call():
                yield Call(self, context, record, instance)

    @raising_context
    async def record(self, context: RequestContext) -> AsyncIterator[Record]:
        """Accounts for a call: it ends once, with one status, and its quota is charged.

        Raises RequestErrors only, whatever its body raised, and lets a cancellation through.
        """
        record = context.record()
        self._note(1)
        try:
            async with self.limits.call(context.caller):
                yield record
        except RequestError as error:
            _note_error(record, error)
            raise
        except asyncio.CancelledError:
            record.outcome = "CANCELLED"
            if _is_past(context.deadline_s, record.arrived_s):
                record.outcome = "DEADLINE_EXCEEDED"
            raise
        except Exception as bug:
            logger.exception("a bug in %s, request %s", context.method, record.request_id)
            failure = StepError(f"a bug in the server; its log has more under {record.request_id}")
            _note_error(record, failure)
            raise failure from bug
        finally:
            self._note(-1)
            record.close()
            self.report(record)

    def reject(self, context: RequestContext, error: RequestError) -> None:
        """Accounts for a call that ended before it began. It is charged to no quota."""
        record, instance = context.record(), self._instance()
        record.model = "" if instance is None else instance.served.name
        _note_error(record, error)
        record.close()
        self.report(record)

    def _note(self, change: int) -> None:
        self._num_open += change
        self._changed_s = time.monotonic()

    async def wait_until_quiet(self, quiet_s: float, max_s: float) -> None:
        """Until no call has gone on, begun or ended for a while."""
        end_s = time.monotonic() + max_s
        while (now_s := time.monotonic()) < end_s:
            if not self._num_open and now_s - self._changed_s > quiet_s:
                return
            await asyncio.sleep(quiet_s / 4)


class Call:
    """One call. It keeps the model instance that served when it began."""

    def __init__(
        self, calls: Calls, context: RequestContext, record: Record, instance: Instance
    ) -> None:
        self._calls = calls
        self._context = context
        self._record = record
        self._instance = instance
        self._deadline_s = _deadline_s(context)
        self._num_requests = 0
        self._is_admitted = False
        self._admitting = asyncio.Lock()

    @property
    def served(self) -> ServedModel:
        return self._instance.served

    async def read(self, parse: Callable[[], GenerateSpec], num_bytes: int) -> ParsedRequest:
        """Checks a request, and doesn't submit it yet. `num_bytes`: about how long it is."""
        reader = RequestReader(self.served)
        parsed = await self._read(reader.read_generate, parse, num_bytes)
        try:
            await self._check(parsed.request)
            return parsed
        except InvalidFieldError as error:
            raise renamed(error, parsed.names) from None

    async def _read(
        self,
        read: Callable[[_Spec, Arrival], ParsedRequest],
        parse: Callable[[], _Spec],
        num_bytes: int,
    ) -> ParsedRequest:
        arrival = self._arrival()

        def parse_and_read() -> ParsedRequest:
            spec = parse()
            try:
                return read(spec, arrival)
            except InvalidFieldError as error:
                raise renamed(error, spec.names) from None

        return await inline_or_thread(num_bytes > MAX_INLINE_BYTES, parse_and_read)

    async def _check(self, request: Request) -> None:
        """Has the grammar worker compile the constraint, before the engine does. Requests of one
        call have one constraint: it is checked for the first of them."""
        grammars, constraint = self.served.grammars, request.constraint
        if constraint is None or grammars is None:
            return
        self._record.has_constraint = True
        if not grammars.has_passed(constraint):
            began_s = time.monotonic()
            try:
                await grammars.check(constraint, request.owner)
            finally:
                self._record.compile_ms = 1000 * (time.monotonic() - began_s)

    async def generate(self, parsed: ParsedRequest) -> Result:
        chunks: list[Chunk] = []

        async def keep(chunk: Chunk) -> None:
            chunks.append(chunk)

        await self.stream(parsed, keep)
        return merge(chunks, parsed.request.num_sequences)

    async def stream(self, parsed: ParsedRequest, send: SendChunk) -> None:
        """Submits a request to the engine, and sends what it generates as it comes."""
        self._record.submitted_s = self._record.submitted_s or time.monotonic()
        async with self._admitted(parsed.request.num_prompt) as usage:
            try:
                await self._serve(parsed, send, usage)
            except InvalidFieldError as error:
                raise renamed(error, parsed.names) from None

    @asynccontextmanager
    async def _admitted(self, num_prompt: int) -> AsyncIterator[QuotaUsage]:
        """A call is admitted as a whole, by the first of its requests: the others wait for it."""
        async with AsyncExitStack() as held:
            async with self._admitting:
                tokens = self._calls.limits.tokens
                caller, is_admitted = self._context.caller, self._is_admitted
                usage = await held.enter_async_context(tokens(caller, num_prompt, is_admitted))
                self._is_admitted = True
            yield usage

    async def _serve(self, parsed: ParsedRequest, send: SendChunk, usage: QuotaUsage) -> None:
        record, request = self._record, parsed.request
        engine, place = self._instance.engine, self._context.place
        async with self._calls.dispatcher.serve(request, engine, place) as inbox:
            await self._context.on_accepted()
            answer = Answer(parsed, self.served.text, inbox.end)
            try:
                while not answer.is_over:
                    chunks = answer.take(await inbox.take())
                    usage.note(answer.num_generated)
                    for chunk in chunks:
                        if chunk.finish is not None:
                            record.note(chunk.finish)
                        await send(chunk)
            finally:  # a client that left has received tokens, too
                if answer.num_cached is not None:
                    usage.is_read = True
                    usage.note(answer.num_generated)
                    record.num_prompt += request.num_prompt
                    record.num_cached += answer.num_cached
                    record.num_generated += answer.num_generated

    async def read_only(
        self,
        read: Callable[[RequestReader, _Spec, Arrival], ParsedRequest],
        parse: Callable[[], _Spec],
        num_bytes: int,
    ) -> tuple[ParsedRequest, Chunk]:
        """A request that generates nothing: `read` is the reader's method for its kind."""
        parsed = await self._read(partial(read, RequestReader(self.served)), parse, num_bytes)
        pooling = parsed.request.pooling
        if pooling is not None and not pooling.masks:
            self._record.num_texts = len(pooling.texts)
        return parsed, (await self.generate(parsed)).sequences[0]

    async def tokenize(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        self.text()
        encode = PromptReader(self.served).encode
        async with self.charged() as charge:
            is_long = len(text) > MAX_INLINE_BYTES
            ids = await inline_or_thread(is_long, encode, text, field, add_special_tokens)
            charge(len(ids))
        check_key_limit(len(ids), field, self._context.caller.max_prompt_tokens)
        return ids

    @asynccontextmanager
    async def charged(self) -> AsyncIterator[Callable[[int], None]]:
        """Tokens of the tokenizer count as a prompt's do. How many is known when they are there: a
        caller who has used up more than the key allows waits first."""
        async with self._calls.limits.tokens(self._context.caller, 0) as usage:
            yield usage.note
            usage.is_read = True

    async def detokenize(self, ids: list[int], field: str, skip_special_tokens: bool) -> str:
        if len(ids) > MAX_DETOKENIZED:
            rule = f"at most {MAX_DETOKENIZED} are taken at once"
            raise InvalidFieldError(field, f"has {len(ids)} tokens; {rule}")
        PromptReader(self.served).check_ids(field, ids)
        async with self.charged() as charge:
            charge(len(ids))
        is_long = 2 * len(ids) > MAX_INLINE_BYTES
        return await inline_or_thread(is_long, self.text().decode, ids, skip_special_tokens)

    def text(self) -> Text:
        if self.served.text is None:
            raise UnsupportedError("this model has no tokenizer: it takes and gives token ids only")
        return self.served.text

    def _arrival(self) -> Arrival:
        """Of the call's next request: the first has the call's own id."""
        record, number = self._record, self._num_requests
        self._num_requests += 1
        return Arrival(
            request_id=f"{record.request_id}-{number}" if number else record.request_id,
            deadline_s=self._deadline_s,
            owner=record.caller,
            cache_scope="" if self._calls.share_cache else record.caller,
            max_prompt_tokens=self._context.caller.max_prompt_tokens,
        )


async def inline_or_thread(
    is_long: bool,
    work: Callable[_Parameters, _Value],
    *args: _Parameters.args,
    **kwargs: _Parameters.kwargs,
) -> _Value:
    """Long work in another thread."""
    if not is_long:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def has_many_logprobs(chunks: Iterable[Chunk]) -> bool:
    """Whether it takes long to write an answer's logprobs, with their alternatives."""
    rated = (each for chunk in chunks for each in (*chunk.prompt_logprobs, *chunk.logprobs))
    return sum(1 + len(each.top) for each in rated) > MAX_INLINE_TOKENS


def _note_error(record: Record, error: RequestError) -> None:
    record.outcome = status_name(error)
    record.rejection = rejection_of(error)
    if isinstance(error, InvalidFieldError):
        record.bad_field = error.field


def _deadline_s(context: RequestContext) -> float | None:
    """A little before the client's own, so that what was generated still gets there."""
    if context.deadline_s is None:
        return None
    left_s = context.deadline_s - time.monotonic()
    return context.deadline_s - min(MAX_MARGIN_S, MARGIN * left_s)


def _is_past(deadline_s: float | None, arrived_s: float) -> bool:
    """Whether a call that its client gave up had reached its deadline.

    gRPC rounds a timeout up by one in a hundred at most before it sends it, so a client's own
    deadline comes a little before the server's.
    """
    if deadline_s is None:
        return False
    left_s, whole_s = deadline_s - time.monotonic(), deadline_s - arrived_s
    return left_s <= ROUNDING * whole_s + SLACK_S

"""One call while it is answered: what generation.proto's messages ask for, and their answers.

Knows: the order of things in a call. Does not know: gRPC, HTTP, how text is made.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.server.auth.quota import QuotaUsage, RateLimits
from quill.server.engine.dispatcher import Dispatcher
from quill.server.errors import InvalidFieldError, UnsupportedError
from quill.server.grammar.compiler import Compiler
from quill.server.grammar.constraint_source import Constraint
from quill.server.grammar.matcher import Grammar
from quill.server.loading.instance import ModelInstance
from quill.server.protocol.answer import Answer, Chunk, merge
from quill.server.protocol.prompt_fields import PromptReader
from quill.server.protocol.reading_fields import ReadingReader
from quill.server.protocol.requests import Arrival, ParsedRequest, RequestReader
from quill.server.protocol.responses import (
    chunk_message,
    embed_response,
    fill_response,
    logprobs_messages,
    model_message,
    response_message,
    timings_message,
)
from quill.server.protocol.served_model import ServedModel
from quill.server.service.origin import Origin
from quill.server.telemetry.call_record import Record
from quill.server.text.tokenizer import Text

Send = Callable[[pb.GenerateChunk], Awaitable[None]]
_SendChunk = Callable[[Chunk], Awaitable[None]]
_Message = TypeVar("_Message", bound=Message)
_Beside = TypeVar("_Beside")
_Result = TypeVar("_Result")

# A long message is read by another thread: nothing slower than a millisecond on the event loop.
MAX_INLINE_BYTES = 2048
MAX_INLINE_VECTORS = 8  # nor are more written there,
MAX_INLINE_TOKENS = 256  # nor answers about more
MAX_DETOKENIZED = 2**17  # tokens
# How long before a client's deadline a request is stopped: a share of its time, and at most.
MARGIN = 0.1
MAX_MARGIN_S = 0.1


class Call:
    """It keeps to the instance that served when it began. It may have several requests."""

    def __init__(
        self,
        origin: Origin,
        record: Record,
        instance: ModelInstance,
        dispatcher: Dispatcher,
        limits: RateLimits,
        share_cache: bool,
    ) -> None:
        self._origin = origin
        self._record = record
        self._instance = instance
        self._dispatcher = dispatcher
        self._limits = limits
        self._share_cache = share_cache
        self._deadline_s = _deadline_s(origin)
        self._num_requests = 0
        self._is_admitted = False

    @property
    def served(self) -> ServedModel:
        return self._instance.served

    async def read(self, message: pb.GenerateRequest) -> ParsedRequest:
        """Checks a request, and doesn't begin with it yet."""
        reader = RequestReader(self.served)
        parsed = await read_message(reader.read_generate, message, self._arrival())
        if parsed.constraint is None or self.served.grammars is None:
            return parsed
        grammar = await self._compile(self.served.grammars, parsed.constraint)
        return replace(parsed, request=replace(parsed.request, constraint=grammar))

    async def _compile(self, grammars: Compiler, constraint: Constraint) -> Grammar:
        """Requests of one call have one constraint: the first of them pays for compiling it."""
        self._record.has_constraint = True
        found = grammars.cached(constraint)
        if found is not None:
            return found
        began_s = time.monotonic()
        try:
            return await grammars.compile(constraint)
        finally:
            self._record.compile_ms = 1000 * (time.monotonic() - began_s)

    async def read_only(self, message: pb.GenerateRequest) -> ParsedRequest:
        """The same for one that is only read and rated: of its answer there is no token."""
        parsed = await self.read(message)
        return replace(parsed, request=replace(parsed.request, max_new_tokens=0))

    async def generate(self, parsed: ParsedRequest) -> pb.GenerateResponse:
        whole = await self._collect(parsed)
        return response_message(whole, self.served.text)

    async def generate_stream(self, parsed: ParsedRequest, send: Send) -> None:
        async def send_chunk(chunk: Chunk) -> None:
            await send(chunk_message(chunk, self.served.text))

        await self._answer(parsed, send_chunk)

    async def score(self, message: pb.ScoreRequest) -> pb.ScoreResponse:
        parsed = await read_message(RequestReader(self.served).read_score, message, self._arrival())
        (whole,) = await self._collect(parsed)
        assert whole.finish is not None
        return pb.ScoreResponse(
            log_likelihood=sum(each.logprob or 0.0 for each in whole.prompt_logprobs),
            tokens=logprobs_messages(whole.prompt_logprobs, self.served.text),
            timings=timings_message(whole.finish.timings),
            request_id=self._record.request_id,
        )

    async def embed(self, message: pb.EmbedRequest) -> pb.EmbedResponse:
        parsed = await read_message(ReadingReader(self.served).read_embed, message, self._arrival())
        assert parsed.request.pooling is not None
        num_texts = self._record.num_texts = len(parsed.request.pooling.texts)
        (whole,) = await self._collect(parsed)
        if num_texts <= MAX_INLINE_VECTORS:
            return embed_response(whole, parsed, self.served)
        return await asyncio.to_thread(embed_response, whole, parsed, self.served)

    async def fill_mask(self, message: pb.FillMaskRequest) -> pb.FillMaskResponse:
        parsed = await read_message(ReadingReader(self.served).read_fill, message, self._arrival())
        (whole,) = await self._collect(parsed)
        return fill_response(whole, parsed, self.served)

    async def tokenize(self, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        return await read_message(_tokenize, message, self.served)

    async def detokenize(self, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        return await read_message(_detokenize, message, self.served)

    def get_model(self) -> pb.Model:
        return model_message(self.served)

    def _arrival(self) -> Arrival:
        """Of its next request: the first has the call's own id."""
        record, number = self._record, self._num_requests
        self._num_requests += 1
        return Arrival(
            request_id=f"{record.request_id}-{number}" if number else record.request_id,
            deadline_s=self._deadline_s,
            owner=record.caller,
            cache_scope="" if self._share_cache else record.caller,
            max_prompt_tokens=self._origin.caller.max_prompt_tokens,
        )

    async def _answer(self, parsed: ParsedRequest, send: _SendChunk) -> None:
        self._record.submitted_s = self._record.submitted_s or time.monotonic()
        async with self._tokens(parsed.request.num_prompt) as usage:
            await self._serve(parsed, send, usage)

    async def _serve(self, parsed: ParsedRequest, send: _SendChunk, usage: QuotaUsage) -> None:
        record, request = self._record, parsed.request
        with self._dispatcher.serve(request, self._instance.engine) as inbox:
            await self._origin.note_taken_in()
            answer = Answer(parsed, self.served.text, inbox.end)
            try:
                while not answer.is_over:
                    chunks = answer.take(await inbox.take())
                    usage.note(answer.num_generated)
                    for chunk in chunks:
                        if chunk.finish is not None:
                            record.note(chunk.finish)
                        await send(chunk)
            finally:  # a client that left has had its tokens too
                if answer.num_cached is not None:
                    usage.is_read = True
                    usage.note(answer.num_generated)
                    record.num_prompt += request.num_prompt
                    record.num_cached += answer.num_cached
                    record.num_generated += answer.num_generated

    @asynccontextmanager
    async def _tokens(self, num_prompt: int) -> AsyncIterator[QuotaUsage]:
        """A call is let in as a whole, by the first of its requests."""
        caller, is_admitted = self._origin.caller, self._is_admitted
        async with self._limits.tokens(caller, num_prompt, is_admitted) as usage:
            self._is_admitted = True
            yield usage

    async def _collect(self, parsed: ParsedRequest) -> list[Chunk]:
        """One chunk for each sequence."""
        chunks: list[Chunk] = []

        async def send(chunk: Chunk) -> None:
            chunks.append(chunk)

        await self._answer(parsed, send)
        return merge(chunks, parsed.request.num_sequences)


async def read_message(
    read: Callable[[_Message, _Beside], _Result], message: _Message, beside: _Beside
) -> _Result:
    """A long one in another thread."""
    if message.ByteSize() <= MAX_INLINE_BYTES:
        return read(message, beside)
    return await asyncio.to_thread(read, message, beside)


def _deadline_s(origin: Origin) -> float | None:
    """A little before the client's own, so that what was made still gets there."""
    if origin.deadline_s is None:
        return None
    left_s = origin.deadline_s - time.monotonic()
    return origin.deadline_s - min(MAX_MARGIN_S, MARGIN * left_s)


def _text(served: ServedModel) -> Text:
    if served.text is None:
        raise UnsupportedError("this model has no tokenizer: it takes and gives token ids only")
    return served.text


def _tokenize(message: pb.TokenizeRequest, served: ServedModel) -> pb.TokenizeResponse:
    text = _text(served)
    whole = message.add_special_tokens if message.HasField("add_special_tokens") else True
    ids = PromptReader(served).encode(message.text, "text", whole)
    return pb.TokenizeResponse(token_ids=ids, tokens=[text.piece(id) for id in ids])


def _detokenize(message: pb.DetokenizeRequest, served: ServedModel) -> pb.DetokenizeResponse:
    if len(message.token_ids) > MAX_DETOKENIZED:
        rule = f"at most {MAX_DETOKENIZED} are taken at once"
        raise InvalidFieldError("token_ids", f"has {len(message.token_ids)} tokens; {rule}")
    PromptReader(served).check_ids("token_ids", message.token_ids)
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    return pb.DetokenizeResponse(text=_text(served).decode(message.token_ids, skip))

"""Turns the engine's events into text: chunks of a stream, or one whole result.

Knows: events, detokenizing, stop strings, tool calls. Does not know: wires, the event loop.
"""

import hashlib
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quill.server.errors import InvalidFieldError, RequestError
from quill.server.frontend.spec import ParsedRequest
from quill.server.outputs import (
    EmbeddingEvent,
    Event,
    FailEvent,
    FinishEvent,
    HypothesisEvent,
    PositionLogprobs,
    PromptEvent,
    StartEvent,
    Timings,
    TokenEvent,
    Usage,
)
from quill.server.request import Request
from quill.server.text.streaming import Decoder, StopStrings, ToolCallParser
from quill.server.text.tokenizer import Text
from quill.server.tools import ToolCallDelta, add_delta

# N texts · D model size, or as many of its numbers as were requested
Embeddings = npt.NDArray[np.float32]
# Ids of tool calls. Mistral's templates take nine letters and digits, and nothing else.
_CHARACTERS = string.ascii_letters + string.digits
_LENGTH = 9


@dataclass(slots=True)
class Chunk:
    """What one sequence generated since the chunk before."""

    sequence: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    embeddings: dict[int, Embeddings] = field(default_factory=dict)  # by text
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish: FinishEvent | None = None


@dataclass(frozen=True)
class Result:
    """A whole answer: one chunk for each sequence, all finished."""

    sequences: list[Chunk]

    @property
    def finishes(self) -> list[FinishEvent]:
        return [each.finish for each in self.sequences if each.finish is not None]

    @property
    def usage(self) -> Usage:
        """Of all sequences together; the prompt counts once."""
        usages = [finish.usage for finish in self.finishes]
        return replace(
            usages[0],
            generated=sum(each.generated for each in usages),
            draft=sum(each.draft for each in usages),
            accepted=sum(each.accepted for each in usages),
        )

    @property
    def timings(self) -> Timings:
        """Up to the end of the last sequence."""
        return max((each.timings for each in self.finishes), key=lambda each: each.total_ms)


class _CallIds:
    """Ids of tool calls: the same request and seed give the same ids."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def of(self, sequence: int, index: int) -> str:
        digest = hashlib.sha256(self._prompt + f"{sequence} {index}".encode()).digest()
        return "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in digest[:_LENGTH])

    @cached_property
    def _prompt(self) -> bytes:
        text = f"{self._request.seed} {self._request.prompt_ids}"
        return hashlib.sha256(text.encode()).digest()


class Answer:
    """All sequences of one request. `end` is called with each whose stop string has appeared."""

    def __init__(
        self, parsed: ParsedRequest, text: Text | None, end: Callable[[int], None]
    ) -> None:
        self._parsed = parsed
        self._end = end
        ids, numbers = _CallIds(parsed.request), range(parsed.request.num_sequences)
        self._sequences = [_Sequence(parsed, text, partial(ids.of, each)) for each in numbers]
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._num_open = len(self._sequences)
        self._has_begun = False
        self.num_cached: int | None = None  # None: the prompt hasn't been read yet

    @property
    def is_over(self) -> bool:
        return not self._num_open

    @property
    def num_generated(self) -> int:
        return sum(sequence.num_tokens for sequence in self._sequences)

    def take(self, events: Iterable[Event]) -> list[Chunk]:
        """One chunk for each sequence that has something new. Raises what ended the request."""
        chunks: dict[int, Chunk] = {}
        for event in events:
            if isinstance(event, FailEvent):
                raise self._of_field(event.error)
            if isinstance(event, PromptEvent):
                self._prompt_logprobs += event.logprobs
            elif isinstance(event, StartEvent):
                self.num_cached = event.cached
            elif isinstance(event, EmbeddingEvent):
                chunks.setdefault(0, Chunk(0)).embeddings[event.text] = event.vector_D
            else:
                self._begin(chunks)
                chunk = chunks.setdefault(event.sequence, Chunk(event.sequence))
                self._add(chunk, event)
        return [chunks[sequence] for sequence in sorted(chunks)]

    def _of_field(self, error: RequestError) -> RequestError:
        """A grammar that failed names the field that asked for it."""
        constraint = self._parsed.request.constraint
        is_tools = constraint is not None and constraint.kind == "tools"
        if is_tools and isinstance(error, InvalidFieldError) and error.field == "constraint":
            return InvalidFieldError("tools", error.reason)
        return error

    def _add(self, chunk: Chunk, event: TokenEvent | HypothesisEvent | FinishEvent) -> None:
        sequence = self._sequences[event.sequence]
        if isinstance(event, FinishEvent):
            sequence.finish(chunk, event)
            self._num_open -= 1
        elif isinstance(event, HypothesisEvent):
            for token in _tokens(event):
                sequence.add(chunk, token)
        elif sequence.add(chunk, event):
            self._end(event.sequence)

    def _begin(self, chunks: dict[int, Chunk]) -> None:
        """Before the first token: the prompt's logprobs and its echo, if they were requested."""
        if self._has_begun:
            return
        self._has_begun = True
        parsed = self._parsed
        if parsed.prompt_logprobs is not None:
            logprobs = _shortened(self._prompt_logprobs, parsed.prompt_logprobs)
            chunks.setdefault(0, Chunk(0)).prompt_logprobs = logprobs
        if parsed.echo:
            for index in range(len(self._sequences)):
                self._echo(chunks.setdefault(index, Chunk(index)))

    def _echo(self, chunk: Chunk) -> None:
        prompt_ids = self._parsed.request.prompt_ids
        chunk.token_ids += prompt_ids
        chunk.text += self._sequences[chunk.sequence].read(prompt_ids)
        if self._parsed.logprobs is not None:
            chunk.logprobs += _shortened(self._prompt_logprobs, self._parsed.logprobs)


class _Sequence:
    def __init__(
        self, parsed: ParsedRequest, text: Text | None, id_of: Callable[[int], str]
    ) -> None:
        self._ends = parsed.request.all_stop_ids
        self._decoder = None if text is None else text.decoder()
        self._stops = StopStrings(parsed.stop)
        self._tools = parsed.tools
        self._calls: ToolCallParser | None = None
        if parsed.tools is not None and parsed.tools.constraint is not None:
            may_speak, names = parsed.tools.mode == "auto", parsed.tools.names
            self._calls = ToolCallParser(parsed.tools.tool_call_format, may_speak, id_of, names)
        self.num_tokens = 0
        self._is_stopped = False

    def read(self, prompt_ids: Sequence[int]) -> str:
        """The prompt's text. A character that it begins may end in the answer."""
        if self._decoder is None:
            return ""
        return "".join(map(self._decoder.add, prompt_ids))

    def add(self, chunk: Chunk, event: TokenEvent) -> bool:
        """Whether a stop string ends here. Tokens generated after it are dropped."""
        if self._is_stopped:
            return False
        self.num_tokens += 1
        chunk.token_ids.append(event.token_id)
        if event.logprobs is not None:
            chunk.logprobs.append(event.logprobs)
        if self._decoder is not None and event.token_id not in self._ends:
            self._show(chunk, self._text_of(event.token_id, self._decoder))
        return self._is_stopped

    def finish(self, chunk: Chunk, event: FinishEvent) -> None:
        if self._decoder is not None and not self._is_stopped:
            self._show(chunk, self._decoder.end())
            if not self._is_stopped:
                self._emit(chunk, self._stops.end())
        if self._calls is not None:
            chunk.text += self._calls.end()
        usage = replace(event.usage, generated=self.num_tokens)
        reason = "stop" if self._is_stopped else event.reason
        chunk.finish = replace(event, reason=reason, usage=usage)

    def _show(self, chunk: Chunk, text: str) -> None:
        released = self._stops.add(text)
        self._emit(chunk, released.text)
        self._is_stopped = released.found

    def _emit(self, chunk: Chunk, text: str) -> None:
        if self._calls is None:
            chunk.text += text
        else:
            read = self._calls.add(text)
            chunk.text += read.text
            for delta in read.deltas:
                add_delta(chunk.calls, delta)

    def _text_of(self, token_id: int, decoder: Decoder) -> str:
        """Special tokens are no text, but for the one that begins calls."""
        if self._tools is not None and token_id == self._tools.marker_id:
            return self._tools.tool_call_format.marker
        return decoder.add(token_id)


def _tokens(event: HypothesisEvent) -> Iterator[TokenEvent]:
    logprobs = event.logprobs or [None] * len(event.token_ids)
    for token_id, report in zip(event.token_ids, logprobs, strict=True):
        yield TokenEvent(event.request_id, event.sequence, token_id, report)


def _shortened(logprobs: Sequence[PositionLogprobs], num_top: int) -> list[PositionLogprobs]:
    return [replace(each, top=each.top[:num_top]) for each in logprobs]


def ranked_logprobs(token: PositionLogprobs, text: Text | None) -> dict[str, Any]:
    """vLLM's shape: by token id. The rank is None for a token beyond those that were requested."""
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, start=1)}
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": ranks.get(token_id),
            "decoded_token": "" if text is None else text.piece(token_id),
        }
        for token_id, logprob in ((token.token_id, token.logprob), *token.top)
    }


def merge(chunks: Iterable[Chunk], num_sequences: int) -> Result:
    """All chunks of an answer, as one for each sequence."""
    whole = [Chunk(sequence) for sequence in range(num_sequences)]
    for chunk in chunks:
        into = whole[chunk.sequence]
        into.text += chunk.text
        into.token_ids += chunk.token_ids
        into.logprobs += chunk.logprobs
        into.prompt_logprobs += chunk.prompt_logprobs
        into.embeddings |= chunk.embeddings
        into.calls += chunk.calls
        into.finish = chunk.finish or into.finish
    return Result(whole)


def whole_embeddings(parsed: ParsedRequest, whole: Chunk) -> Embeddings:
    """Truncated and normalized as requested."""
    embeddings_ND = np.stack([whole.embeddings[text] for text in range(len(whole.embeddings))])
    return shaped(embeddings_ND, parsed.dimensions, parsed.normalize)


def shaped(embeddings_ND: Embeddings, dimensions: int | None, normalize: bool) -> Embeddings:
    """Truncated, then scaled to the length 1: each summed in one order, so batch-invariant."""
    embeddings_ND = embeddings_ND[:, :dimensions]
    if not normalize:
        return embeddings_ND
    wide_ND = embeddings_ND.astype(np.float64)
    lengths_N1 = np.sqrt(np.add.accumulate(wide_ND**2, axis=1)[:, -1:])
    return (wide_ND / np.where(lengths_N1 == 0, 1, lengths_N1)).astype(np.float32)

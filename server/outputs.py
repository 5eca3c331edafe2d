"""What the engine answers: one batch of events a step.

Knows: token ids, reasons, numbers. Does not know: protobuf, text, threads.

For each accepted request, in this order: a StartEvent when it leaves the queue, PromptEvents if
its prompt's logprobs were asked for, TokenEvents, or one HypothesisEvent for each sequence of a
beam search; then each sequence ends with one FinishEvent. A pooling request has EmbeddingEvents in
any order, or one PromptEvent for all masks, and one FinishEvent.
A FailEvent may come at any point instead and ends all its sequences. Nothing follows the end.
"""

from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quill.server.errors import RequestError

FinishReason = Literal["stop", "eos", "length", "cancelled", "deadline"]


class Alternative(NamedTuple):
    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One position in the model's own distribution, before penalties and truncation."""

    token_id: int
    logprob: float | None  # None: a prompt's first token follows nothing
    top: tuple[Alternative, ...]  # best first, as many as were asked for


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """In tokens."""

    prompt: int
    cached: int  # of the prompt: not computed, taken from the prefix cache
    generated: int  # of one sequence
    draft: int = 0  # checked, beside those that were generated one by one
    accepted: int = 0  # of the draft tokens


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """In milliseconds, each from the request's arrival."""

    queue_ms: float
    first_token_ms: float  # 0 if there was no token
    total_ms: float


class StartEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request left the queue."""

    request_id: str
    cached: int
    was_looked_up: bool = True  # in the prefix cache; a source for an encoder never is


class PromptEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Some of the prompt's positions, in order; several events make up the whole prompt."""

    request_id: str
    logprobs: tuple[PositionLogprobs, ...]


class EmbeddingEvent(msgspec.Struct, frozen=True, array_like=True, eq=False, tag=True):
    """The embedding of one of a request's texts."""

    request_id: str
    text: int  # which of them
    vector_D: npt.NDArray[np.float32]


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One sequence has one token more. The token that ends a sequence comes too."""

    request_id: str
    sequence: int
    token_id: int
    logprobs: PositionLogprobs | None


class HypothesisEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All tokens of one sequence, best sequence first: the output of a beam search."""

    request_id: str
    sequence: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]  # one a token, if they were asked for


class FinishEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One sequence is complete."""

    request_id: str
    sequence: int
    reason: FinishReason
    seed: int  # gives this sequence by itself, as sequence 0
    usage: Usage
    timings: Timings
    score: float | None = None  # of a beam search's hypothesis


class FailEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request and all its sequences ended without an answer."""

    request_id: str
    error: RequestError


Event = (
    StartEvent
    | PromptEvent
    | EmbeddingEvent
    | TokenEvent
    | HypothesisEvent
    | FinishEvent
    | FailEvent
)
StepKind = Literal["prefill", "decode", "mixed"]


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """One step in numbers, for metrics."""

    kind: StepKind
    duration_s: float
    num_tokens: int  # one for each decoding sequence, draft tokens, chunks of prompts
    num_prompt_tokens: int = 0  # of these: of prompts, sources, and what was preempted
    num_draft_tokens: int = 0
    num_accepted: int = 0  # of the draft tokens
    num_preempted: int = 0  # requests that lost their blocks
    num_jump_forward: int = 0  # of the accepted: a grammar left no choice
    masks_s: float | None = None  # until all masks were there; None: no sequence has a grammar


class QueueStats(NamedTuple):
    """What runs and waits, whether or not a step was run: a client may leave between two."""

    num_sequences: int  # that run
    num_waiting: int
    num_blocks: int = 0  # that they use
    num_requests: int = 0  # with running sequences


class DiskCacheStats(NamedTuple):
    """Of the blocks of --prefix-cache-dir, since the last time; `used_bytes`: now."""

    num_read: int
    read_bytes: int
    num_written: int
    written_bytes: int
    num_dropped: int  # that weren't written
    num_damaged: int
    used_bytes: int


class EngineOutputs(msgspec.Struct, frozen=True, array_like=True):
    """What one round of the engine produced. `step` is None if only messages were handled."""

    events: tuple[Event, ...]
    step: StepStats | None
    queue: QueueStats | None = None  # afterwards; None: not from the engine
    disk: DiskCacheStats | None = None  # None: there is no disk cache

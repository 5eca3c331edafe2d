"""When a call is retried, after what delay, and which part of a repeated response is new.

Knows: errors, deadlines, chunks. Does not know: requests, channels, waiting.
The same seed gives the same tokens on every server of a model, also after a restart. A repeated
response that differs from what was received is an error.
"""

import logging
import random
import time
from collections import defaultdict
from dataclasses import dataclass

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.client.errors import CallError

logger = logging.getLogger(__name__)

_OVERLOADED = grpc.StatusCode.RESOURCE_EXHAUSTED
# Finish reasons that don't depend on time; a deadline cuts the repeated response sooner.
_COMPLETE = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_EOS, pb.FINISH_REASON_LENGTH)


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Exponential backoff with jitter. Only calls that have no response yet are retried."""

    max_retries: int = 5
    first_s: float = 0.2
    max_s: float = 30.0

    def delay_s(self, error: CallError, num_tried: int, left_s: float | None) -> float | None:
        """None: give up. The server's own delay goes first; the deadline is never overrun."""
        if num_tried >= self.max_retries or not is_retryable(error):
            return None
        delay_s = error.retry_after_s
        if delay_s is None:
            # Jitter, so that clients that failed together don't come back together.
            delay_s = min(self.first_s * 2**num_tried, self.max_s) * random.uniform(0.5, 1)
        return None if left_s is not None and delay_s >= left_s else delay_s

    def warn(self, error: CallError, delay_s: float) -> None:
        """So that nobody waits without knowing why. Where logging isn't set up, on stderr."""
        busy = "the server is busy: " if error.code is _OVERLOADED else ""
        logger.warning(
            "%s%s (retrying in %.1f s, %d times at most)",
            *(busy, error.reason, delay_s, self.max_retries),
        )


class Attempts:
    """The attempts of one call, until it succeeds or its deadline passes."""

    def __init__(self, retries: Retries, timeout_s: float | None) -> None:
        self._retries = retries
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def delay_s(
        self, error: CallError, *, warn: bool = True, has_other: bool = False
    ) -> float | None:
        """After a failed attempt: how long to wait before the next. None: give up.

        `has_other`: another server can be called, without waiting.
        """
        left_s = None if has_other else self.left_s
        delay_s = self._retries.delay_s(error, self._num_failed, left_s)
        if delay_s is not None and has_other:
            delay_s = 0.0
        elif delay_s is not None and warn and not self._num_failed:
            self._retries.warn(error, delay_s)
        self._num_failed += 1
        return delay_s


def is_retryable(error: CallError) -> bool:
    """Whether the same call may succeed later, or on another server."""
    # Without a delay it isn't overload, but a message that is too large.
    if error.code is _OVERLOADED and error.retry_after_s is not None:
        return True
    if error.is_broken:
        return True
    return error.code is grpc.StatusCode.UNAVAILABLE and not error.is_lasting


class ResumeFilter:
    """What the caller has received of each sequence. `restart` when the response is repeated."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._text: dict[int, str] = defaultdict(str)
        self._ended: set[int] = set()
        self._arguments: dict[tuple[int, int], str] = {}  # of each tool call of a sequence
        self.restart()

    def restart(self) -> None:
        self._num_tokens: dict[int, int] = defaultdict(int)  # of this attempt
        self._num_characters: dict[int, int] = defaultdict(int)
        self._num_of_calls: dict[tuple[int, int], int] = defaultdict(int)
        self._is_first: dict[int, bool] = dict.fromkeys(self._tokens, False)

    def filter(self, chunk: pb.GenerateChunk) -> pb.GenerateChunk | None:
        """The new part of a chunk; None if nothing is new."""
        number = chunk.sequence
        has_ended = number in self._ended
        old = self._old(self._tokens[number], self._num_tokens[number], list(chunk.token_ids))
        seen = self._num_characters[number]
        old_text = self._old(self._text[number], seen, chunk.text)
        self._num_tokens[number] += len(chunk.token_ids)
        self._num_characters[number] += len(chunk.text)
        self._tokens[number] += chunk.token_ids[old:]
        self._text[number] += chunk.text[old_text:]
        calls = [new for delta in chunk.tool_calls if (new := self._new(number, delta))]
        if chunk.finish_reason in _COMPLETE and self._num_tokens[number] < len(
            self._tokens[number]
        ):
            raise _different()  # the response ends before what was received does
        if chunk.finish_reason:
            self._ended.add(number)
        return None if has_ended else self._rest(chunk, old, old_text, calls)

    def _new(self, number: int, delta: pb.ToolCallDelta) -> pb.ToolCallDelta | None:
        """The new part of a tool call's delta."""
        call = number, delta.index
        received = self._arguments.get(call)
        old = self._old(received or "", self._num_of_calls[call], delta.arguments)
        self._num_of_calls[call] += len(delta.arguments)
        self._arguments[call] = (received or "") + delta.arguments[old:]
        if received is None:
            return delta
        rest = delta.arguments[old:]
        return pb.ToolCallDelta(index=delta.index, arguments=rest) if rest else None

    def _rest(
        self,
        chunk: pb.GenerateChunk,
        old: int,
        old_text: int,
        calls: list[pb.ToolCallDelta],
    ) -> pb.GenerateChunk | None:
        rest = pb.GenerateChunk()
        rest.CopyFrom(chunk)
        del rest.tool_calls[:]
        rest.tool_calls.extend(calls)
        del rest.token_ids[:old]
        del rest.logprobs[:old]
        rest.text = chunk.text[old_text:]
        if not self._is_first.setdefault(chunk.sequence, True):
            rest.ClearField("prompt_logprobs")  # received before
        is_new = rest.token_ids or rest.text or rest.finish_reason or rest.prompt_logprobs
        return rest if is_new or calls else None

    def _old(self, received: list[int] | str, seen: int, new: list[int] | str) -> int:
        """How many tokens or characters of `new` were received before."""
        before = received[seen : seen + len(new)]
        if before != new[: len(before)]:
            raise _different()
        return len(before)


def _different() -> CallError:
    return CallError(
        grpc.StatusCode.DATA_LOSS,
        "the stream broke, and the repeated response differs from what was received. Is another "
        "model served now, or one that isn't deterministic?",
    )

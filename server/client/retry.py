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

_MAX_DOUBLINGS = 16  # of the delay; floats have an end
# Then a retry waits though another server serves: the request may be what kills them.
_MAX_AT_ONCE = 5
_OVERLOADED = grpc.StatusCode.RESOURCE_EXHAUSTED
# Finish reasons that don't depend on time; a deadline cuts the repeated response sooner.
_COMPLETE = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_EOS, pb.FINISH_REASON_LENGTH)


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Exponential backoff with jitter, until the call's deadline.

    `max_retries`: consecutive, without a new token; None: as many as there is time for.
    `first_s`, `max_s`: the delays; a server that is back is found after the latter at most.
    `unavailable_timeout_s`: for calls without a deadline, after the first failure. Six times what
    the restart of a server with the default model took.
    `retry_connect`: False: a client that has reached no server yet fails at once.
    `retry_rejected`: False: a server that is too busy (RESOURCE_EXHAUSTED) ends a call that has
    brought nothing yet. What has begun is still resumed.
    """

    max_retries: int | None = None
    first_s: float = 0.2
    max_s: float = 2.0
    unavailable_timeout_s: float = 60.0
    retry_connect: bool = True
    retry_rejected: bool = True

    def delay_s(self, error: CallError, num_failed: int, left_s: float | None) -> float | None:
        """None: give up. The server's own delay goes first; the deadline is never overrun."""
        is_often = self.max_retries is not None and num_failed >= self.max_retries
        if is_often or not is_retryable(error):
            return None
        delay_s = error.retry_after_s
        if delay_s is None:
            # Jitter, so that clients that failed together don't come back together.
            longest_s = min(self.first_s * 2 ** min(num_failed, _MAX_DOUBLINGS), self.max_s)
            delay_s = longest_s * random.uniform(0.5, 1)
        return None if left_s is not None and delay_s >= left_s else delay_s


class Attempts:
    """The attempts of one call, until it succeeds or its time is over."""

    def __init__(self, retries: Retries, timeout_s: float | None) -> None:
        self._retries = retries
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.note_progress()
        self._has_progress = False

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def note_progress(self) -> None:
        """The call has brought something new: failures before that don't count."""
        self._num_failed = 0
        self._has_warned = False
        self._has_progress = True

    def delay_s(self, error: CallError, *, has_other: bool, was_reached: bool) -> float | None:
        """After a failed attempt: how long to wait before the next. None: give up.

        `has_other`: another server can be called, at first without waiting.
        `was_reached`: this client has reached a server before.
        """
        is_final = not (self._retries.retry_rejected or self._has_progress)
        if is_final and error.code is _OVERLOADED:
            return None
        now_s = time.monotonic()
        if not self._num_failed:
            self._failed_s = now_s
        is_over = self._end_s is None and (
            now_s - self._failed_s > self._retries.unavailable_timeout_s
        )
        is_unreached = error.is_unreached and not was_reached and not self._retries.retry_connect
        at_once = has_other and self._num_failed < _MAX_AT_ONCE
        left_s = None if at_once else self.left_s
        delay_s = self._retries.delay_s(error, self._num_failed, left_s)
        self._num_failed += 1
        if delay_s is None or (not at_once and (is_over or is_unreached)):
            return None
        if at_once:
            return 0.0
        self._warn(error, delay_s)
        return delay_s

    def _warn(self, error: CallError, delay_s: float) -> None:
        """Once, so that nobody waits without knowing why. Where logging isn't set up, on stderr."""
        if self._has_warned:
            return
        self._has_warned = True
        retries, left_s = self._retries, self.left_s
        limit = f"for {retries.unavailable_timeout_s if left_s is None else left_s:.0f} s at most"
        if retries.max_retries is not None:
            limit = f"{retries.max_retries} times at most"
        busy = "the server is busy: " if error.code is _OVERLOADED else ""
        logger.warning("%s%s (retrying in %.1f s, %s)", busy, error.reason, delay_s, limit)


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

"""Resumes a stream that broke: drops what was received before from the repeated response.

Knows: chunks. Does not know: channels, waiting.
The same seed gives the same tokens on every server of a model, also after a restart. A response
that differs from what was received is an error.
"""

from collections import defaultdict

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.client.errors import CallError

# Finish reasons that don't depend on time; a deadline cuts the repeated response sooner.
_COMPLETE = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_EOS, pb.FINISH_REASON_LENGTH)


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

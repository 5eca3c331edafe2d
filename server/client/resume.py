"""A stream that broke is asked for again, and goes on where it broke.

Knows: chunks. Does not know: channels, waiting.
The same seed gives the same tokens, also after a restart: so what a client has been given already
can be left out of the same answer when it comes again. Another answer is an error.
"""

from collections import defaultdict

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.client.call_error import CallError

# Ends that an answer has wherever it is made; deadlines cut it sooner the second time.
WHOLE = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_EOS, pb.FINISH_REASON_LENGTH)


class ResumeFilter:
    """What the caller has of each sequence. `replay` when the answer begins again."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._text: dict[int, str] = defaultdict(str)
        self._ended: set[int] = set()
        self._arguments: dict[tuple[int, int], str] = {}  # of each call of a sequence
        self.replay()

    def replay(self) -> None:
        self._num_tokens: dict[int, int] = defaultdict(int)  # that came in this round
        self._num_characters: dict[int, int] = defaultdict(int)
        self._num_of_calls: dict[tuple[int, int], int] = defaultdict(int)
        self._is_first: dict[int, bool] = dict.fromkeys(self._tokens, False)

    def take(self, chunk: pb.GenerateChunk) -> pb.GenerateChunk | None:
        """What is new in it; None if nothing is."""
        number = chunk.sequence
        has_ended = number in self._ended
        old = self._old(self._tokens[number], self._num_tokens[number], list(chunk.token_ids))
        seen = self._num_characters[number]
        old_text = self._old(self._text[number], seen, chunk.text)
        self._num_tokens[number] += len(chunk.token_ids)
        self._num_characters[number] += len(chunk.text)
        self._tokens[number] += chunk.token_ids[old:]
        self._text[number] += chunk.text[old_text:]
        calls = [new for piece in chunk.tool_calls if (new := self._new(number, piece))]
        if chunk.finish_reason in WHOLE and self._num_tokens[number] < len(self._tokens[number]):
            raise _another()  # it ends before what was given does
        if chunk.finish_reason:
            self._ended.add(number)
        return None if has_ended else self._rest(chunk, old, old_text, calls)

    def _new(self, number: int, piece: pb.ToolCallDelta) -> pb.ToolCallDelta | None:
        """What a piece adds to its call."""
        call = number, piece.index
        given = self._arguments.get(call)
        old = self._old(given or "", self._num_of_calls[call], piece.arguments)
        self._num_of_calls[call] += len(piece.arguments)
        self._arguments[call] = (given or "") + piece.arguments[old:]
        if given is None:
            return piece
        rest = piece.arguments[old:]
        return pb.ToolCallDelta(index=piece.index, arguments=rest) if rest else None

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
            rest.ClearField("prompt_logprobs")  # they came with what was given before
        is_new = rest.token_ids or rest.text or rest.finish_reason or rest.prompt_logprobs
        return rest if is_new or calls else None

    def _old(self, given: list[int] | str, seen: int, came: list[int] | str) -> int:
        """How many of what came were given before."""
        before = given[seen : seen + len(came)]
        if before != came[: len(before)]:
            raise _another()
        return len(before)


def _another() -> CallError:
    return CallError(
        grpc.StatusCode.DATA_LOSS,
        "the stream broke, and the answer that came instead is another one. Is another model "
        "served now, or one that isn't deterministic?",
    )

"""An answer that comes again is given only from where it broke."""

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.server.client.errors import CallError
from quill.server.client.retry import ResumeFilter


def chunk(text: str, sequence: int = 0, last: bool = False) -> pb.GenerateChunk:
    """A token for each character, with its logprob."""
    ids = [ord(character) for character in text]
    said = pb.GenerateChunk(sequence=sequence, text=text, token_ids=ids)
    said.logprobs.extend(pb.TokenLogprobs(token_id=id) for id in ids)
    if last:
        said.finish_reason = pb.FINISH_REASON_LENGTH
    return said


def take(given: ResumeFilter, *chunks: pb.GenerateChunk) -> list[str]:
    new = [given.filter(each) for each in chunks]
    for each in new:
        if each is not None:
            assert [ord(character) for character in each.text] == list(each.token_ids)
            assert [said.token_id for said in each.logprobs] == list(each.token_ids)
    return [each.text for each in new if each is not None]


def test_what_was_given_is_left_out_however_it_is_cut() -> None:
    given = ResumeFilter()
    assert take(given, chunk("ab"), chunk("c")) == ["ab", "c"]
    given.restart()
    assert take(given, chunk("a"), chunk("bcd"), chunk("e", last=True)) == ["d", "e"]


def test_end_that_was_not_heard_is_told_even_without_new_text() -> None:
    given = ResumeFilter()
    take(given, chunk("ab"))
    given.restart()
    last = given.filter(chunk("ab", last=True))
    assert last is not None
    assert (last.text, last.finish_reason) == ("", pb.FINISH_REASON_LENGTH)


def test_answer_that_ends_before_what_was_given_is_another_one() -> None:
    given = ResumeFilter()
    take(given, chunk("abc"))
    given.restart()
    with pytest.raises(CallError, match="differs") as caught:
        take(given, chunk("a"), chunk("b", last=True))
    assert caught.value.code is grpc.StatusCode.DATA_LOSS


def test_answer_that_the_clock_cuts_before_what_was_given_ends_by_the_clock() -> None:
    given = ResumeFilter()
    take(given, chunk("abc"))
    given.restart()
    cut = chunk("b")
    cut.finish_reason = pb.FINISH_REASON_DEADLINE
    assert take(given, chunk("a"), cut) == [""]


def test_end_is_told_once() -> None:
    given = ResumeFilter()
    take(given, chunk("ab", last=True), chunk("x", 1))
    given.restart()
    assert take(given, chunk("ab", last=True), chunk("xy", 1, last=True)) == ["y"]


def test_calls_go_on_where_they_broke() -> None:
    def call(index: int, arguments: str, id: str = "") -> pb.GenerateChunk:
        piece = pb.ToolCallDelta(index=index, id=id, name="f" if id else "", arguments=arguments)
        return pb.GenerateChunk(tool_calls=[piece])

    def pieces(*chunks: pb.GenerateChunk) -> list[tuple[int, str, str]]:
        new = [each for each in map(given.filter, chunks) if each is not None]
        return [(one.index, one.id, one.arguments) for each in new for one in each.tool_calls]

    given = ResumeFilter()
    assert pieces(call(0, "", "a"), call(0, '{"x')) == [(0, "a", ""), (0, "", '{"x')]
    given.restart()
    again = (call(0, "", "a"), call(0, "{"), call(0, '"x": 1}'), call(1, "", "b"), call(1, "{}"))
    assert pieces(*again) == [(0, "", '": 1}'), (1, "b", ""), (1, "", "{}")]
    given.restart()
    pieces(call(0, "", "a"))
    with pytest.raises(CallError, match="differs"):
        given.filter(call(0, "[]"))


def test_sequences_are_kept_apart() -> None:
    given = ResumeFilter()
    take(given, chunk("ab", 0), chunk("x", 1))
    given.restart()
    assert take(given, chunk("xy", 1), chunk("abc", 0)) == ["y", "c"]


def test_prompts_logprobs_are_given_once() -> None:
    first = chunk("a")
    first.prompt_logprobs.add(token_id=1)
    given = ResumeFilter()
    told = given.filter(first)
    assert told is not None
    assert len(told.prompt_logprobs) == 1
    given.restart()
    assert given.filter(first) is None


def test_another_answer_is_an_error_and_not_a_mixture() -> None:
    given = ResumeFilter()
    take(given, chunk("ab"))
    given.restart()
    with pytest.raises(CallError, match="differs") as caught:
        given.filter(chunk("ax"))
    assert caught.value.code is grpc.StatusCode.DATA_LOSS

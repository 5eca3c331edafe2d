"""`quill generate` and `quill chat`, through the front door."""

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quill.__main__ import main
from quill.protos import generation_pb2 as pb
from quill.server.cli import chat, generate
from quill.server.cli.client_commands import CHAT_SAMPLING
from quill.server.client.errors import CallError
from quill.server.client.requests import Options
from tests.server.cli.conftest import Run
from tests.server.running import Running, make_manifest, make_served, running_server


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server() as server:
        yield server


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("abc --max-new-tokens 4", "defg\n"),
        ("Z --max-new-tokens 3", "\n"),
        ("Z --max-new-tokens 3 --min-new-tokens 2", "\0ab\n"),
        ("abc --max-new-tokens 2 --num-sequences 2 --temperature 1 --seed 1", "[0] de\n[1] de\n"),
        (f"abc --max-new-tokens 1 --logit-bias {ord('q') + 1}:100", "q\n"),
        ("c --regex [a-c]{2}1", "ab1\n"),
        ("c --choice dog --choice cat", "dog\n"),
    ],
)
def test_text_is_continued_with_these_options(run: Run, arguments: str, printed: str) -> None:
    assert run("generate", *arguments.split()) == (0, printed, "")


def test_beam_search_is_stopped_as_was_chosen(run: Run) -> None:
    options = "--beams 2 --early-stopping at-once --max-new-tokens 2"
    assert run("generate", "abc", *options.split())[0] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--top-p 2", "top_p is 2.0; it must be"),
        (
            "--max-new-tokens 3 --min-new-tokens 4",
            "min_new_tokens is 4; it must be from 0 to max_new_tokens, which is 3",
        ),
        ("--json-schema none.json", "none.json can't be read"),
        ("--regex (", "constraint.regex can't be kept to"),
        ("--logprobs 2", "--logprobs and --prompt-logprobs are printed with --json alone"),
        ("--prompt-logprobs 2", "--logprobs and --prompt-logprobs are printed with --json alone"),
    ],
)
def test_rejection_is_one_line(run: Run, arguments: str, problem: str) -> None:
    code, printed, errors = run("generate", "abc", *arguments.split())
    assert (code, printed) == (1, "")
    assert errors.startswith(f"quill: {problem}")
    assert errors.count("\n") == 1


def test_prompt_may_come_from_a_pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ab"))
    assert run("generate", "-", "--stop", "f", "--echo")[1] == "abcde\n"


def test_json_has_everything(run: Run) -> None:
    _, printed, _ = run("generate", "abc", "--max-new-tokens", "2", "--seed", "4", "--json")
    answer = json.loads(printed)
    assert answer["sequences"][0]["text"] == "de"
    assert answer["seed"] == "4"


def test_tokens_have_their_true_bytes(run: Run) -> None:
    _, printed, _ = run("generate", "é", "--max-new-tokens", "2", "--logprobs", "1", "--json")
    told = json.loads(printed)["sequences"][0]["logprobs"]
    assert [each["text"] for each in told] == ["\ufffd", "\ufffd"]
    assert [base64.b64decode(each["bytes"]) for each in told] == [b"\xc3", b"\xa9"]
    assert [base64.b64decode(each["top"][0]["bytes"]) for each in told] == [b"\xc3", b"\xa9"]


def test_schemas_and_grammars_are_read_from_files(run: Run, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "array", "items": {"enum": ["x"]}, "minItems": 1, "maxItems": 1}')
    grammar.write_text('start: "p" "q"')
    assert run("generate", "c", "--json-schema", str(schema))[1] == '["x"]\n'
    assert run("generate", "c", "--grammar", str(grammar))[1] == "pq\n"
    assert run("generate", "c", "--json-object", "--max-new-tokens", "2")[1].startswith("{")


@pytest.mark.parametrize("given", [(), ("--temperature", "0"), ("--json",), ("--beams", "1")])
def test_answers_that_are_equal_because_nothing_was_drawn_come_with_a_note(
    run: Run, given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    several = ("abc", "--max-new-tokens", "2", "--num-sequences", "2")
    note = run("generate", *several, *given)[2]  # the model's own temperature is 0
    assert note.startswith("(the 2 answers are equal: at temperature 0 ")
    assert "--temperature" in note
    assert note.count("\n") == 1


@pytest.mark.parametrize("given", [("--temperature", "1"), ("--beams", "2")])
def test_answers_that_were_drawn_or_searched_come_without_that_note(
    run: Run, given: tuple[str, ...]
) -> None:
    several = ("abc", "--max-new-tokens", "2", "--num-sequences", "2")
    assert run("generate", *several, *given)[2] == ""


def test_seed_is_told_on_a_terminal_if_it_was_not_given(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    told = re.compile(r"\(--seed \d+ gives this answer again\)\n")
    short = ("abc", "--max-new-tokens", "2")
    for option in ("--max-new-tokens 2", "--num-sequences 2 --temperature 1"):
        assert told.fullmatch(run("generate", *short, *option.split())[2])
    for option in ("--seed 4", "--beams 2", "--json"):
        assert run("generate", *short, *option.split())[2] == ""


def test_error_in_the_middle_of_an_answer_has_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken() -> Iterator[pb.GenerateChunk]:
        yield pb.GenerateChunk(text="de")
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")

    with pytest.raises(CallError):
        generate._show(broken())
    assert capsys.readouterr().out == "de\n"


def test_answer_that_the_timeout_cut_off_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    reason = pb.FINISH_REASON_DEADLINE
    assert generate._show([pb.GenerateChunk(text="de", finish_reason=reason, seed=3)]) == 3
    assert capsys.readouterr() == ("de\n", "(cut off by --timeout)\n")


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--logit-bias", "x", "'x' isn't ID:BIAS"),
        ("--top-k", "many", "'many' isn't a whole number"),
        ("--top-p", "most", "'most' isn't a number"),
    ],
)
def test_value_of_another_type_is_rejected(
    option: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "abc", option, value])
    assert problem in capsys.readouterr().err


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    remaining = iter(lines)

    def answer(_: str) -> str:
        line = next(remaining, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)


def test_chat_remembers_what_was_said(
    run: Run, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "hi", "", "so", "/quit", "never")
    while not running.records.empty():
        running.records.get()
    _, printed, _ = run("chat", "--max-new-tokens", "3")
    assert printed.count("lmn") == 2
    running.next_record("OK")  # GetModel
    first, second = running.next_record("OK"), running.next_record("OK")
    # The template writes "u:hi" + end, then for the second turn "a:lmn" + end and "u:so" + end.
    assert (first.num_prompt, second.num_prompt) == (6, 6 + 6 + 5)


def test_chat_has_sampling_defaults_of_its_own_if_the_model_has_none() -> None:
    plain, with_defaults = pb.Model(), pb.Model(defaults={"temperature": 0.7})
    given: Options = {"top_p": 0.5}
    assert chat.with_chat_defaults(given, plain) == {**CHAT_SAMPLING, "top_p": 0.5}
    assert chat.with_chat_defaults(given, with_defaults) == given
    assert chat.with_chat_defaults({"num_beams": 4}, plain) == {"num_beams": 4}


@pytest.mark.parametrize("option", [("--logprobs", "0"), ("--num-sequences", "2"), ("--echo",)])
def test_chat_has_no_options_that_it_could_not_show(run: Run, option: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        run("chat", *option)


def test_chat_needs_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    served = make_served(template=None, manifest=make_manifest(chat_template=None))
    with running_server(served=served) as server:
        assert main(["chat", "--address", server.address]) == 1
    assert "has no chat template. Use `quill generate`" in capsys.readouterr().err


def test_chat_survives_a_refusal_and_ctrl_c_at_the_prompt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "x" * 300, KeyboardInterrupt, "hi")
    code, printed, _ = run("chat", "--max-new-tokens", "3")
    assert code == 0
    assert "messages has" in printed
    assert "lmn" in printed


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(
    run: Run, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "hi")
    interrupted = iter([KeyboardInterrupt])

    def show(*pieces: str, **options: object) -> None:
        printed.append(" ".join(pieces))
        if pieces and pieces[0].startswith("l"):
            raise next(interrupted)

    printed: list[str] = []
    for module in (generate, chat):
        monkeypatch.setattr(module, "print", show, raising=False)
    running.session.hold()
    running.session.let_go(1)
    code, *_ = run("chat")
    running.session.let_go()
    assert code == 0
    assert " [stopped]" in printed
    running.next_record("CANCELLED")

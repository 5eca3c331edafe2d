"""The benchmark of structured output, on a real server with a small untrained model."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench import structured
from quill.loadtest.bench.backends import quill_structured
from quill.loadtest.bench.backends.quill_server import ServerConfig
from quill.loadtest.bench.backends.quill_streams import Answer
from quill.loadtest.bench.backends.quill_structured import QuillStructured, Validity, validate
from quill.loadtest.bench.structured import ROWS
from quill.loadtest.environment.server import StartedServer
from quill.loadtest.workload.constraints import SCHEMAS, adversarial_constraints
from quill.protos import generation_pb2 as pb


@pytest.fixture
def backend(talker: StartedServer) -> Iterator[QuillStructured]:
    with ExitStack() as stack:
        yield QuillStructured(ServerConfig(address=talker.address), stack)


def test_batched_answers_are_valid_and_the_same_alone(backend: QuillStructured) -> None:
    found = backend.answers(num_seeds=1, num_users=8, num_alone=20, max_new_tokens=60)
    assert found["problems"] == []
    assert found["statuses"] == {"OK": len(SCHEMAS)} == {"OK": found["num"]}
    assert found["num_valid"] == found["num_ended"] > 10
    assert found["num_equal"] == found["num_alone"] == 20
    assert [row.result for row in ROWS["answers"]([found])][2] == "20 of 20"


def test_invalid_answers_are_found() -> None:
    eos = pb.FINISH_REASON_EOS
    answers = [Answer(text=text, finish=eos) for text in ("11", "3", "[")]
    answers += [Answer(text="11", finish=pb.FINISH_REASON_LENGTH), Answer(status="INTERNAL")]
    found = validate(["a mark from 1 to 10"] * len(answers), answers)
    assert (found["num_ended"], found["num_valid"]) == (3, 1)
    greater, broken, failed = found["problems"]
    assert "11 is greater than the maximum of 10" in greater
    assert "no JSON" in broken
    assert "INTERNAL" in failed
    assert Answer([1, 2]).key != Answer([1, 3]).key
    assert Answer([1, 2], finish=eos).key != Answer([1, 2]).key


def test_formats_count() -> None:
    validity = Validity({"type": "string", "format": "date"})
    assert validity.problem('"2026-02-28"') == ""
    assert "date" in validity.problem('"2026-02-30"')


def test_speed_compares_as_many_tokens(
    backend: QuillStructured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quill_structured, "NUM_STORY", 12)
    monkeypatch.setattr(quill_structured, "NUM_WATCHED", 128)  # in several chunks
    found = backend.speed(num_users=4, max_new_tokens=12)
    assert {*found} == {"schemas", "story", "gap"}
    assert all(len(pair) == 2 and min(pair) > 0 for pair in found.values())
    assert len(ROWS["speed"]([found, found])) == 3


def test_adversarial_constraints_end_soon_and_streams_go_on(
    backend: QuillStructured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quill_structured, "NUM_NEW", 80)
    found = backend.adversarial(num_streams=2)
    times_s = found["rejected_s"] | found["first_token_s"]
    assert found["failed"] == {}
    assert {*times_s} == {*adversarial_constraints()} == {*found["extra_steps"]}
    assert len(found["rejected_s"]) > 10
    assert max(times_s.values()) < 5, "the bar is 1 on an idle machine"
    assert len(ROWS["adversarial"]([found])) == 3


def test_command_prints_a_table_and_writes_its_results(
    talking_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--parts", "answers", "--seeds", "1", "--alone", "5", "--threads", "1"]
    command = ["bench", "structured", str(talking_bundle), *options, "--out", str(tmp_path)]
    assert main(command) == 0
    assert "valid, of those that ended" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "structured.json").read_text())["results"]
    assert result["turns"]["answers"][0]["num_equal"] == 5
    assert main([*command, "--parts", "answers,colour"]) == 2
    assert "has colour; there are answers, speed, adversarial" in capsys.readouterr().err


def test_a_model_without_an_end_of_text_is_rejected(
    talking_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = replace(read_manifest(talking_bundle), stop_ids=())
    monkeypatch.setattr(structured, "read_manifest", lambda directory: endless)
    assert main(["bench", "structured", str(talking_bundle)]) == 2
    assert "has no structured output" in capsys.readouterr().err

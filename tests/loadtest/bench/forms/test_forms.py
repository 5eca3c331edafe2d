"""The benchmark of forms, on a real server with a small model that talks nonsense."""

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.forms import answers, hostile, run, speed
from quill.loadtest.bench.forms.answers import Verdict, check_answers
from quill.loadtest.bench.forms.crowd import Heard, Server
from quill.loadtest.bench.forms.hostile import besiege
from quill.loadtest.bench.forms.speed import Costs, measure
from quill.loadtest.bench.forms.validity import Validity
from quill.loadtest.environment.own_server import OwnServer
from quill.loadtest.errors import OptionError
from quill.loadtest.workload.forms import SCHEMAS
from quill.loadtest.workload.hostile_forms import hostile_forms
from quill.protos import generation_pb2 as pb

_Result = TypeVar("_Result")


def asked(server: OwnServer, do: Callable[[Server], Awaitable[_Result]]) -> _Result:
    async def talk() -> _Result:
        async with grpc.aio.insecure_channel(server.address) as channel:
            return await do(Server(channel))

    return asyncio.run(talk())


def test_answers_of_a_crowd_are_valid_and_the_same_alone(
    talker: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_NEW_TOKENS", 60)
    verdict = asked(talker, lambda server: check_answers(server, 1, 8, 20))
    assert verdict.problems == []
    assert verdict.statuses == {"OK": len(SCHEMAS)} == {"OK": verdict.num_asked}
    assert verdict.num_valid == verdict.num_whole > 10
    assert verdict.num_equal == verdict.num_alone == 20


def test_what_is_wrong_is_found() -> None:
    verdict = Verdict()
    eos = pb.FINISH_REASON_EOS
    said = [Heard(text="11", finish=eos), Heard(text="3", finish=eos), Heard(text="[", finish=eos)]
    said += [Heard(text="11", finish=pb.FINISH_REASON_LENGTH), Heard(status="INTERNAL")]
    answers._validate(["a mark from 1 to 10"] * len(said), said, verdict)
    assert (verdict.num_whole, verdict.num_valid) == (3, 1)
    greater, broken, failed = verdict.problems
    assert "11 is greater than the maximum of 10" in greater
    assert "no JSON" in broken
    assert "INTERNAL" in failed
    answers._compare(Heard([1, 2]), Heard([1, 3]), ("a word", 7), verdict)
    answers._compare(Heard([1, 2]), Heard([1, 2]), ("a word", 8), verdict)
    assert (verdict.num_alone, verdict.num_equal) == (2, 1)


def test_formats_count() -> None:
    validity = Validity({"type": "string", "format": "date"})
    assert validity.problem('"2026-02-28"') == ""
    assert "date" in validity.problem('"2026-02-30"')


def test_both_sides_of_a_round_get_as_many_tokens(
    talker: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "MAX_NEW_TOKENS", 12)
    monkeypatch.setattr(speed, "NUM_STORY", 12)
    monkeypatch.setattr(speed, "NUM_WATCHED", 24)
    costs = Costs()
    asked(talker, lambda server: measure(server, 4, costs))
    for pairs in (costs.schemas, costs.story, costs.gaps):
        (pair,) = pairs
        assert min(pair) > 0


def test_hostile_forms_are_refused_or_followed_soon_and_streams_go_on(
    talker: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "NUM_NEW", 80)
    siege = asked(talker, lambda server: besiege(server, 2))
    assert siege.failed == {}
    assert {*siege.refused_s, *siege.followed_s} == {*hostile_forms()} == {*siege.longest}
    assert len(siege.refused_s) > 10
    assert siege.slowest_s < 5, "the bar is 1 on a machine that does nothing else"


def test_the_command_shows_a_table_and_writes_what_it_found(
    talking_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_NEW_TOKENS", 40)
    args = argparse.Namespace(
        bundle=talking_bundle,
        parts="answers",
        seeds=1,
        alone=5,
        rounds=1,
        precision=None,
        threads=1,
        out=tmp_path / "out",
    )
    run.run(args)
    assert "valid, of those that ended" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "forms.json").read_text())
    assert found["answers"]["num_equal"] == 5
    args.parts = "answers,colour"
    with pytest.raises(OptionError, match="has colour; there are answers, speed, hostile"):
        run.run(args)


def test_a_model_whose_texts_have_no_end_is_refused(
    talking_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = replace(read_manifest(talking_bundle), stop_ids=())
    monkeypatch.setattr(run, "read_manifest", lambda directory: endless)
    args = argparse.Namespace(bundle=talking_bundle, parts="answers")
    with pytest.raises(OptionError, match="can't be asked for forms"):
        run.run(args)

"""`quill translate`: what is there is used again, and a served model answers."""

import json
from pathlib import Path

import pytest

import quill
from server.errors import StartError
from server.translate import _is_trained, _serving
from tests.server.tiny_bundle import TinyBundle


def make_run(path: Path, num_steps: int, last: int) -> Path:
    (path / f"step-{last:08d}").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"recipe": {"num_steps": num_steps}}))
    return path


def test_only_a_run_with_its_last_step_is_trained(tmp_path: Path) -> None:
    assert _is_trained(make_run(tmp_path / "whole", 12, 12))
    assert not _is_trained(make_run(tmp_path / "stopped", 12, 9))
    assert not _is_trained(tmp_path / "none")


def test_trained_and_exported_model_is_served_and_asked(
    tmp_path: Path, tiny_translator: TinyBundle, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", 3, 3)
    given = ["--run", str(run), "--bundle", str(tiny_translator.directory)]
    assert quill.main(["translate", "Stop", *given]) == 0
    said = capfd.readouterr().out
    assert f"[1/4] {run} is trained already" in said
    assert '[4/4] quill generate "Stop"\n' in said
    assert '[4/4] quill generate "Stop" --beams 4\n' in said


def test_server_that_does_not_start_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="didn't start"), _serving(tmp_path / "nothing"):
        pass

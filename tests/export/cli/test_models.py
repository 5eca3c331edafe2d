"""`quill models`: what is listed can be served and removed by what is shown."""

import os
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.cache import cache_lock
from quill.model.checkpoint.checkpoint import save_checkpoint
from quill.model.sources.kinds import find_source
from tests.export.tiny import make_checkpoint
from tests.tiny_networks import LLAMA

KEY = "0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUILL_CACHE", str(tmp_path))
    for bundle in ("smollm2-135m", "mine", "org--name"):
        (tmp_path / "bundles" / f"{bundle}-{KEY}").mkdir(parents=True)
        (tmp_path / "bundles" / f"{bundle}-{KEY}" / "manifest.json").write_text("{}")
    (tmp_path / "hub" / "org--name").mkdir(parents=True)
    return tmp_path


def cached(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What is listed, but for models that aren't in the cache."""
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0] for line in lines if line.endswith(")") and " MB (" in line}


def test_each_model_is_listed_by_what_serves_it(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = cache / "bundles" / f"mine-{KEY}"
    listed = cached(capsys)
    kinds = {name: find_source(name).kind for name in listed}
    assert kinds == {"smollm2-135m": "catalogue", "hf:org/name": "hub", str(mine): "bundle"}


def test_what_is_listed_can_be_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in cached(capsys):
        assert main(["models", "--remove", name]) == 0
        capsys.readouterr()
        assert name not in cached(capsys)
    assert not list(cache.glob("*/*"))
    assert main(["models", "--remove", "mine"]) == 1
    assert "the cache has no mine; it has nothing" in capsys.readouterr().err


def unfinished(cache: Path, name: str) -> Path:
    """What a killed export leaves."""
    path = cache / "bundles" / f".{name}"
    path.mkdir()
    (path / "matrix").write_bytes(b"0" * 600_000)
    return path


def test_what_a_killed_export_left_is_listed_and_removed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = [unfinished(cache, f"smollm2-135m-{KEY}.{end}") for end in ("parts", "abc.part")]
    left.append(unfinished(cache, f"smollm2-135m-{KEY[::-1]}.parts"))
    other = unfinished(cache, f"org--name-{KEY}.parts")
    assert main(["models"]) == 0
    assert "2 MB (bundles, unfinished)" in capsys.readouterr().out
    assert main(["models", "--remove", "smollm2-135m"]) == 0
    assert not any(path.exists() for path in left)
    assert other.exists()


def test_a_running_export_keeps_what_it_has(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = unfinished(cache, f"smollm2-135m-{KEY}.parts")
    with cache_lock(KEY):
        assert main(["models", "--remove", "smollm2-135m"]) == 0
        assert f"Left {path}: another process exports this model now" in capsys.readouterr().out
        assert path.exists()
    assert main(["models", "--remove", "smollm2-135m"]) == 0
    assert not path.exists()


def test_an_export_removes_what_earlier_ones_of_its_model_left_and_what_is_old(
    cache: Path, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "tiny", make_checkpoint(LLAMA))
    left, old, other = (
        unfinished(cache, f"{name}-{KEY}.parts") for name in ("tiny", "old", "other")
    )
    running = unfinished(cache, f"tiny-{KEY[::-1]}.parts")
    os.utime(old, (0, 0))
    with cache_lock(KEY[::-1]):
        arguments = [str(tmp_path / "tiny"), "--precision", "fp32", "--no-verify"]
        assert main(["export", *arguments]) == 0
    assert not left.exists()
    assert not old.exists()
    assert other.exists()
    assert running.exists()

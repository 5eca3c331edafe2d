"""`quill models`: what is listed can be served and removed by what is shown."""

from pathlib import Path

import pytest

from quill.__main__ import main
from quill.model.sources.kinds import find_source

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

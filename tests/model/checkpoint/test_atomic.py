"""Whole or absent: nothing half-written ever has the final name."""

import stat
from pathlib import Path

import pytest

from quill.model.checkpoint.atomic import atomic_directory, atomic_file


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_directory_appears_whole_for_all_to_read_and_replaces_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with atomic_directory(out) as directory:
        (directory / "old-only").write_text("old")
    with atomic_directory(out) as directory:
        (directory / "inner").mkdir()
        private = directory / "inner" / "private"
        private.write_text("new")
        private.chmod(0o600)
        assert names(out) == ["old-only"]
    assert (names(out.parent), names(out)) == (["out"], ["inner"])
    assert (out / "inner" / "private").read_text() == "new"
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert stat.S_IMODE((out / "inner" / "private").stat().st_mode) == 0o644


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("has_old", [True, False])
def test_a_failure_leaves_the_old_directory_or_nothing(
    tmp_path: Path, has_old: bool, failure: type[BaseException]
) -> None:
    if has_old:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "content").write_text("old")

    def fail() -> None:
        with atomic_directory(tmp_path / "out") as directory:
            (directory / "content").write_text("half")
            raise failure

    with pytest.raises(failure):
        fail()
    assert names(tmp_path) == ["out"] * has_old
    assert not has_old or (tmp_path / "out" / "content").read_text() == "old"


def test_a_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    for content in ("old", "new"):
        with atomic_file(path) as temporary:
            temporary.write_text(content)
    assert path.read_text() == "new"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_failure_keeps_the_old_file(
    tmp_path: Path, is_early: bool, failure: type[BaseException]
) -> None:
    (tmp_path / "file").write_text("old")

    def fail() -> None:
        with atomic_file(tmp_path / "file") as temporary:
            if not is_early:
                temporary.write_text("half")
            raise failure

    with pytest.raises(failure):
        fail()
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]

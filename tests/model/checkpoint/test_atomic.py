"""Whole or absent: nothing half-written ever has the final name."""

import stat
from pathlib import Path

import pytest

from quill.model.checkpoint.atomic import atomic_directory, atomic_file


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_directory(path: Path, content: str, failure: type[BaseException] | None = None) -> None:
    with atomic_directory(path) as directory:
        (directory / "content").write_text(content)
        if failure is not None:
            raise failure


def write_file(path: Path, content: str, failure: type[BaseException] | None = None) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(content)
        if failure is not None:
            raise failure


def test_a_directory_appears_whole_with_its_parents(tmp_path: Path) -> None:
    write_directory(tmp_path / "a" / "b", "new")
    assert (tmp_path / "a" / "b" / "content").read_text() == "new"
    assert names(tmp_path / "a") == ["b"]


def test_a_directory_has_no_final_name_while_it_is_written(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory:
        (directory / "content").write_text("half")
        assert not (tmp_path / "out").exists()


def test_others_may_read_the_directory(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory:
        private = directory / "private"
        private.write_text("new")
        private.chmod(0o600)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "out" / "private").stat().st_mode) == 0o644


def test_a_directory_replaces_the_old_one_and_all_its_files(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory:
        (directory / "old-only").write_text("old")
    write_directory(tmp_path / "out", "new")
    assert names(tmp_path / "out") == ["content"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, OSError])
def test_a_failure_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure):
        write_directory(tmp_path / "out", "half", failure)
    assert names(tmp_path) == []


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, OSError])
def test_a_failure_keeps_the_old_directory(tmp_path: Path, failure: type[BaseException]) -> None:
    write_directory(tmp_path / "out", "old")
    with pytest.raises(failure):
        write_directory(tmp_path / "out", "half", failure)
    assert (tmp_path / "out" / "content").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_directory_with_subdirectories_is_written(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory:
        (directory / "inner").mkdir()
        (directory / "inner" / "content").write_text("deep")
    assert (tmp_path / "out" / "inner" / "content").read_text() == "deep"


def test_a_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    for content in ("old", "new"):
        write_file(path, content)
    assert path.read_text() == "new"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, OSError])
def test_a_failure_keeps_the_old_file(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(failure):
        write_file(path, "half", failure)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_failure_before_anything_was_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="early"), atomic_file(tmp_path / "file"):
        raise ValueError("early")
    assert names(tmp_path) == []

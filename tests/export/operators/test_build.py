"""Building the custom operators: the right sources, and messages instead of tracebacks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quill.export.operators import build, library
from quill.export.operators.build import BuildError, find_compiler, units
from quill.export.operators.library import (
    library_path,
    operators_are_fast,
    operators_problem,
    seal,
)
from tests.operators import needs_operators

ROOT = Path(__file__).parents[3]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of operators with a single, wrong source."""
    (tmp_path / "operators.cpp").write_text("int main( {}\n")
    for module in (library, build):
        monkeypatch.setattr(module, "SOURCES", tmp_path)
    return tmp_path


def test_every_source_is_compiled_where_its_instructions_are() -> None:
    names = {path.stem for path in library.SOURCES.glob("*.cpp")}
    assert set(units("x86_64")) == names
    assert set(units("aarch64")) == names - {name for name in names if "avx" in name}
    assert not any(flag.startswith("-m") for flag in units("aarch64")["plain"])


def test_a_library_is_named_by_its_sources(sources: Path) -> None:
    before = library_path()
    (sources / "operators.cpp").write_text("int main() {}\n")
    assert library_path() != before
    (sources / "operators.cpp").write_text("int main( {}\n")
    assert library_path() == before


@pytest.mark.usefixtures("sources")
def test_what_was_not_built_is_said_with_what_to_do() -> None:
    assert "make operators" in str(operators_problem())
    assert not operators_are_fast()


@pytest.mark.usefixtures("sources")
def test_a_library_that_cannot_be_loaded_is_a_problem_in_words() -> None:
    library_path().write_bytes(b"no library")
    assert "can't be loaded" in str(operators_problem()), "nobody has said what it should be"
    seal(library_path())
    assert "can't be loaded" in str(operators_problem()), "it is no library"
    other = next(Path(np.__file__).parent.glob("_core/_multiarray_umath*.so"))
    library_path().write_bytes(other.read_bytes())
    seal(library_path())
    assert "can't be loaded" in str(operators_problem()), "it is another library"


@pytest.mark.usefixtures("sources")
def test_a_library_that_was_cut_short_is_not_loaded() -> None:
    """Loading it would end the process."""
    library_path().write_bytes(b"library" * 1000)
    seal(library_path())
    library_path().write_bytes(b"library" * 500)
    assert "damaged" in str(operators_problem())


def test_no_compiler_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        find_compiler()


def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -O2")
    assert find_compiler() == [sys.executable, "-O2"]


@needs_operators
def test_a_source_that_does_not_compile_leaves_nothing_behind(sources: Path) -> None:
    with pytest.raises(BuildError, match="failed:\n"):
        build.build()
    assert [path.name for path in sources.iterdir()] == ["operators.cpp"]


def test_the_compiler_from_pypi_is_the_last_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert find_compiler() == [sys.executable, "-m", "ziglang", "c++"]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BuildError, match=r"apt-get install g\+\+.*pip install ziglang"):
        find_compiler()


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("options", [[], ["--quiet"], ["--find-compiler"]])
def test_set_up_without_a_compiler_says_what_to_install(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sys, "argv", ["build_operators", *options])
    assert build.main() == 1
    said = capsys.readouterr().err
    assert "no C++ compiler" in said
    assert "apt-get install g++" in said


@needs_operators
def test_what_is_built_is_not_built_again() -> None:
    command = [sys.executable, "-m", "quill.export.operators.build"]
    environment = os.environ | {"CXX": "no-such-compiler"}
    said = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "is up to date" in said.stdout

"""Finds the library of Quill's custom operators, and the kernels that it chooses.

Knows: the library that `make operators` builds from export/operators/kernels/. Does not know:
graphs, how to build it (export/operators/build.py). The server finds the library through this
module, so it imports only the standard library.
"""

import ctypes
import functools
import hashlib
import os
from pathlib import Path

SOURCES = Path(__file__).parent / "kernels"
BUILDER = Path(__file__).parent / "build.py"
HOW_TO_BUILD = (
    "`make operators` or `python -m quill.export.operators.build` does; it takes g++, clang++ or "
    "`pip install ziglang`"
)
PLAIN = "plain"  # kernels without vector instructions: correct, and slow


def library_path() -> Path:
    """Named by the hash of its sources and of how they are compiled."""
    digest = hashlib.sha256()
    for path in (BUILDER, *sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return SOURCES / f"operators-{digest.hexdigest()[:12]}.so"


def seal(library: Path) -> None:
    """Records the library's hash: loading a damaged one would end the process."""
    _seal_of(library).write_text(_hash(library), encoding="ascii")


def _seal_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _hash(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def operators_problem() -> str | None:
    """The reason why the operators can't be loaded; None if they can."""
    library = library_path()
    if not library.exists():
        return f"Quill's custom operators aren't built here ({HOW_TO_BUILD})"
    try:
        if _seal_of(library).read_text(encoding="ascii") != _hash(library):
            return "Quill's custom operators are damaged (`make operators` builds them again)"
        kernels(library)
    except (OSError, AttributeError) as error:
        return f"Quill's custom operators can't be loaded (`make operators` builds them): {error}"
    return None


def operators_are_fast() -> bool:
    """Whether this processor has the vector instructions that the kernels use."""
    return operators_problem() is None and kernels(library_path()) != PLAIN


@functools.cache
def kernels(library: Path) -> str:
    """Which kernels the library chooses: avx512, avxvnni, avx2 or plain."""
    loaded = ctypes.CDLL(os.fspath(library))
    loaded.QuillKernels.restype = ctypes.c_char_p
    name: bytes = loaded.QuillKernels()
    return name.decode()

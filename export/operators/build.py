"""Builds Quill's own operators: `make operators`, or `python -m quill.export.operators.build`.

Knows: the compiler's arguments. Does not know: what the operators compute.

One library serves every processor of its kind: each set of kernels is compiled for its own
instructions, and the best is chosen when the library is loaded. Every server needs it: it chooses
tokens, too. Where there is no compiler, PyPI has one.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quill.export.operators.library import SOURCES, library_path, operators_problem, seal

COMPILERS = ("c++", "g++", "clang++")
FROM_PYPI = "ziglang"  # 438 MB, and minutes for its first compilation
OPTIONS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    # Products and sums are fused where the source says so and nowhere else: all machines must
    # compute the same.
    "-ffp-contract=off",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVXVNNI = (*AVX2, "-mavxvnni")  # 256 bits
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# Slow in any case, and -O3 takes the compiler 16 s where -O2 takes it 7.
PORTABLE: dict[str, tuple[str, ...]] = {
    **{"operators": (), "plain": ("-O2",)},
    **{"sampling": (), "sampling_plain": (), "quantize": (), "limits": ()},
}
X86: dict[str, tuple[str, ...]] = {
    **{"avx2": AVX2, "avxvnni": AVXVNNI, "avx512": AVX512},
    **{"sampling_avx2": AVX2, "sampling_avx512": AVX512, "quantize_avx2": AVX2},
    **{"limits_avx2": AVX2, "limits_avxvnni": AVXVNNI, "limits_avx512": AVX512},
}


class BuildError(Exception):
    """The operators can't be built; the message says why."""


def units(machine: str) -> dict[str, tuple[str, ...]]:
    """The sources to compile, each with the instructions that it may use."""
    return PORTABLE | (X86 if machine in ("x86_64", "AMD64") else {})


def find_compiler() -> list[str]:
    """The compiler's command: $CXX, which may have arguments, one of those that are usual, or the
    one from PyPI."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or COMPILERS:
        if shutil.which(name) is not None:
            return wanted or [name]
    if not wanted and importlib.util.find_spec(FROM_PYPI) is not None:
        return [sys.executable, "-m", FROM_PYPI, "c++"]
    raise BuildError(
        f"there is no C++ compiler ({shlex.join(wanted) or ', '.join(COMPILERS)}). Install one "
        f"(Debian: apt-get install g++), or the one from PyPI (pip install {FROM_PYPI})"
    )


def build() -> Path:
    """Builds the library that is served with. What was built from other sources is removed."""
    library = library_path()
    compile_library(library)
    for old in SOURCES.glob("operators-*"):
        if old.stem != library.stem:
            old.unlink()
    return library


def compile_library(library: Path, extra: Sequence[str] = ()) -> None:
    """Compiles and links it, and records its hash. `extra`: more options, for sanitizers."""
    compiler, chosen = find_compiler(), units(platform.machine())
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        objects = {name: str(Path(directory, f"{name}.o")) for name in chosen}
        with ThreadPoolExecutor() as pool:
            jobs = [
                pool.submit(
                    _compile,
                    [*compiler, *OPTIONS, *flags, *extra, "-c", f"{name}.cpp", "-o", objects[name]],
                )
                for name, flags in chosen.items()
            ]
            for job in jobs:
                job.result()
        linked = Path(directory, library.name)
        _run([*compiler, *extra, "-shared", "-pthread", "-o", str(linked), *objects.values()])
        linked.replace(library)
    seal(library)


def _compile(command: list[str]) -> None:
    """GCC before 11 doesn't know AVX-VNNI: these kernels are those of AVX2 then."""
    try:
        _run(command)
    except BuildError:
        if AVXVNNI[-1] not in command:
            raise
        _run([option for option in command if option != AVXVNNI[-1]])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"it ended with {done.returncode} and said nothing"
        raise BuildError(f"`{shlex.join(command)}` failed:\n{said}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build Quill's own operators.")
    parser.add_argument("--quiet", action="store_true", help="say nothing if they are up to date")
    parser.add_argument("--find-compiler", action="store_true", help="only look for one")
    options = parser.parse_args()
    try:
        if options.find_compiler:
            print(shlex.join(find_compiler()))
        elif operators_problem() is not None:
            _build_and_say()
        elif not options.quiet:
            print(f"{library_path().name} is up to date")
    except (BuildError, OSError) as error:
        print(f"Quill's own operators can't be built: {error}", file=sys.stderr)
        return 1
    return 0


def _build_and_say() -> None:
    print("compiling Quill's own operators (a minute or two)", flush=True)
    start = time.monotonic()
    library = build()
    print(f"{library.name}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

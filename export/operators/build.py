"""Builds Quill's own operators: `make operators`, or `python -m quill.export.operators.build`.

Knows: the compiler's arguments. Does not know: what the operators compute.

One library serves every processor of its kind: each set of kernels is compiled for its own
instructions, and the best is chosen when the library is loaded. Without a compiler nothing is lost
but speed: the server then takes other graphs. So that is said, and isn't an error.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quill.export.operators.library import SOURCES, library_path, operators_problem, seal

COMPILERS = ("c++", "g++", "clang++")
OPTIONS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    # Products and sums are fused where the source says so and nowhere else: all machines must
    # compute the same.
    "-ffp-contract=off",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# Slow in any case, and -O3 takes the compiler 16 s where -O2 takes it 7.
PORTABLE: dict[str, tuple[str, ...]] = {
    **{"operators": (), "plain": ("-O2",)},
    **{"sampling": (), "sampling_plain": ()},
}
X86: dict[str, tuple[str, ...]] = {
    **{"avx2": AVX2, "avx512": AVX512},
    **{"sampling_avx2": AVX2, "sampling_avx512": AVX512},
}


class BuildError(Exception):
    """The operators can't be built; the message says why."""


def units(machine: str) -> dict[str, tuple[str, ...]]:
    """The sources to compile, each with the instructions that it may use."""
    return PORTABLE | (X86 if machine in ("x86_64", "AMD64") else {})


def find_compiler() -> list[str]:
    """The compiler's command: $CXX, which may have arguments, or one of those that are usual."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or COMPILERS:
        if shutil.which(name) is not None:
            return wanted or [name]
    raise BuildError(f"there is no C++ compiler ({shlex.join(wanted) or ', '.join(COMPILERS)})")


def build() -> Path:
    """Compiles and links. What was built from other sources is removed."""
    library, compiler = library_path(), find_compiler()
    with tempfile.TemporaryDirectory(dir=SOURCES) as directory:
        chosen = units(platform.machine())
        with ThreadPoolExecutor() as pool:
            jobs = [
                pool.submit(_run, [*compiler, *OPTIONS, *flags, "-c", f"{name}.cpp", "-o", target])
                for name, flags in chosen.items()
                for target in [str(Path(directory, f"{name}.o"))]
            ]
            for job in jobs:
                job.result()
        objects = [str(Path(directory, f"{name}.o")) for name in chosen]
        linked = Path(directory, library.name)
        _run([*compiler, "-shared", "-pthread", "-o", str(linked), *objects])
        linked.replace(library)
    seal(library)
    for old in SOURCES.glob("operators-*"):
        if old.stem != library.stem:
            old.unlink()
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"it ended with {done.returncode} and said nothing"
        raise BuildError(f"`{shlex.join(command)}` failed:\n{said}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build Quill's own operators.")
    parser.add_argument("--optional", action="store_true", help="no compiler is no error")
    optional = parser.parse_args().optional
    if operators_problem() is None:
        if not optional:
            print(f"{library_path().name} is up to date")
        return 0
    print("compiling Quill's own operators (half a minute or a minute)", flush=True)
    start = time.monotonic()
    try:
        library = build()
    except (BuildError, OSError) as error:
        print(f"Quill's own operators can't be built: {error}", file=sys.stderr)
        print("The server works without them; precisions quill4 and quill8 don't.", file=sys.stderr)
        return 0 if optional else 1
    print(f"{library.name}: {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make test-sanitize`: the operators under AddressSanitizer and UndefinedBehaviorSanitizer.

Builds the library with both in build/sanitize. Then, with each set of kernels that this processor
has: the tests of operators and of the sampler, and random graphs
(tests/export/operators/random_graphs.py). Ends with code 1 at the first report.

Knows: the compilers' options, what is run. Does not know: what operators compute.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quill.export.operators.build import BuildError, compile_library, find_compiler
from quill.export.operators.library import library_path
from tests.export.operators.custom_kernels import KERNELS

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *("-O1", "-g1", "-fno-omit-frame-pointer"),
)
TESTS = (
    *("tests/export/operators", "--ignore=tests/export/operators/test_build.py"),
    "tests/server/sampling",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # What Python keeps until its end isn't a leak. Memory that is refused is an exception.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
CHOSEN = (
    "import pathlib, sys; from quill.export.operators.library import kernels; "
    "print(kernels(pathlib.Path(sys.argv[1])))"
)
# Asks the sampler for the likeliest of 3,003 tokens where there are 3,000.
READ_BEYOND = """
import ctypes, sys, numpy
arrays = (numpy.zeros(3000, "float32"), *(numpy.zeros(64) for _ in range(4)))
logits, tops, ids, values, outcomes = (ctypes.c_void_p(each.ctypes.data) for each in arrays)
stride, vocabulary, rows, most, threads = map(ctypes.c_int64, (3000, 3003, 1, 1, 1))
top = ctypes.CDLL(sys.argv[1]).QuillTops
top(logits, stride, vocabulary, rows, tops, most, threads, ids, values, outcomes)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="of random graphs, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first graph")
    parser.add_argument("--graphs", type=int, help="at most so many, and no tests")
    parser.add_argument("--kernels", choices=KERNELS, action="append", help="only these")
    args = parser.parse_args()
    try:
        extra, preloaded = find_runtime(find_compiler())
        library = build(extra)
    except BuildError as error:
        print(f"skipped: {error}")
        return 0
    environment = os.environ | ENVIRONMENT | {"LD_PRELOAD": preloaded}
    environment |= {"QUILL_SANITIZED": str(library)}
    kernels = [each for each in args.kernels or KERNELS if has(each, library, environment)]
    print(f"kernels: {', '.join(kernels)}", flush=True)
    for each in kernels:
        chosen = environment | {"QUILL_KERNELS": each}
        if not notices(library, chosen):
            print("the sanitizer doesn't notice that logits are read out of bounds")
            return 1
        if args.graphs is None and not passes(TESTS, chosen):
            print(f"the tests fail with the kernels {each}")
            return 1
        limits = ["--seconds", str(args.seconds / len(kernels))]
        limits += [] if args.graphs is None else ["--graphs", str(args.graphs)]
        if not survives(["--seed", str(args.seed), "--first", str(args.first), *limits], chosen):
            return 1
    return 0


def find_runtime(compiler: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The options, and the libraries to preload: Python isn't built with sanitizers, and exceptions
    of C++ need its library beside theirs."""
    is_clang = "clang" in _output([*compiler, "--version"])
    machine = _output([*compiler, "-dumpmachine"]).partition("-")[0]
    name = f"libclang_rt.asan-{machine}.so" if is_clang else "libasan.so"
    found = [_output([*compiler, f"-print-file-name={each}"]) for each in (name, "libstdc++.so.6")]
    if not all(map(os.path.isfile, found)):
        raise BuildError(f"`{shlex.join(compiler)}` has no AddressSanitizer ({name})")
    return (*OPTIONS, *(("-shared-libasan",) if is_clang else ())), " ".join(found)


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def build(extra: Sequence[str]) -> Path:
    library = ROOT / "build/sanitize" / library_path().name
    if not library.exists():
        print("compiling the operators with sanitizers (minutes)", flush=True)
        library.parent.mkdir(parents=True, exist_ok=True)
        compile_library(library, extra)
    return library


def has(kernels: str, library: Path, environment: dict[str, str]) -> bool:
    """Whether this processor has their instructions."""
    command = [sys.executable, "-c", CHOSEN, str(library)]
    environment = environment | {"QUILL_KERNELS": kernels}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip() == kernels


def notices(library: Path, environment: dict[str, str]) -> bool:
    """A sanitizer that reports nothing would find nothing, too."""
    command = [sys.executable, "-c", READ_BEYOND, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode != 0 and "heap-buffer-overflow" in done.stderr


def passes(tests: Sequence[str], environment: dict[str, str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.sanitized", *tests]
    command += ["-p", "no:cacheprovider", "--durations", "3"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def survives(arguments: Sequence[str], environment: dict[str, str]) -> bool:
    """Random graphs. A report ends their process: the file has the number of the last one."""
    with tempfile.NamedTemporaryFile() as progress:
        module = "tests.export.operators.random_graphs"
        command = [sys.executable, "-m", module, "--progress", progress.name, *arguments]
        command += ["--library", environment["QUILL_SANITIZED"]]
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0:
            return True
        last = Path(progress.name).read_text() or "none"
    kernels = environment["QUILL_KERNELS"]
    print(f"seed and number of the last graph: {last}. Again: python -m tests.sanitize", end=" ")
    seed, _, number = last.partition(" ")
    print(f"--kernels {kernels} --seed {seed} --first {number} --graphs 1")
    return False


if __name__ == "__main__":
    sys.exit(main())

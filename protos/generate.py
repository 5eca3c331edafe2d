"""Makes the Python code of generation.proto: `python -m protos.generate [--check]`.

Knows: protoc and its plugins. Does not know: what the messages mean.
With --check nothing is written: it fails if the committed code isn't what would be made.
"""

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

SOURCE = "protos/generation.proto"
MADE = tuple(
    f"protos/generation_{name}" for name in ("pb2.py", "pb2.pyi", "pb2_grpc.py", "pb2_grpc.pyi")
)


def generate(root: Path, out: Path) -> None:
    """Writes the code below `out`. `root` is the directory that has protos/ in it."""
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy_grpc"
    failure = protoc.main(
        [
            *("protoc", f"-I{root}", f"--python_out={out}", f"--pyi_out={out}"),
            *(f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"),
            *(f"--plugin=protoc-gen-mypy_grpc={plugin}", SOURCE),
        ]
    )
    if failure:
        raise SystemExit(f"protoc failed on {SOURCE} with code {failure}")


def stale(root: Path) -> list[str]:
    """The committed files that aren't what protoc makes of the source now."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        generate(root, out)
        return [name for name in MADE if not _same(root / name, out / name)]


def _same(committed: Path, made: Path) -> bool:
    return committed.is_file() and committed.read_bytes() == made.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    root = Path(__file__).resolve().parents[1]
    if not parser.parse_args().check:
        generate(root, root)
    elif names := stale(root):
        sys.exit(f"out of date: {', '.join(names)}. Run: make protos")


if __name__ == "__main__":
    main()

"""Makes the Python code of the .proto files: `python -m quill.protos.generate [--check]`.

Knows: protoc and its plugins. Does not know: what the messages mean.
With --check nothing is written: it fails if the committed code isn't what would be made.
"""

import argparse
import sys
import sysconfig
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

# Each source, and what is made of it.
MESSAGES = ("pb2.py", "pb2.pyi")
SERVICES = ("pb2_grpc.py", "pb2_grpc.pyi")
SOURCES = {
    "generation": (*MESSAGES, *SERVICES),
    "error_details": MESSAGES,
    "health": MESSAGES,
    "kserve": (*MESSAGES, *SERVICES),
}
MADE = tuple(f"protos/{source}_{name}" for source, names in SOURCES.items() for name in names)


def generate(root: Path, out: Path) -> None:
    """Writes the code below `out`. `root` is the directory that has protos/ in it.

    protoc makes imports of paths: it sees both directories by the name of the package.
    """
    with tempfile.TemporaryDirectory() as directory:
        seen, made = Path(directory, "seen"), Path(directory, "made")
        for link, target in ((seen, root), (made, out)):
            link.mkdir()
            (link / "quill").symlink_to(target)
        for source, names in SOURCES.items():
            _run(f"quill/protos/{source}.proto", seen, made, has_service="pb2_grpc.py" in names)


def _run(source: str, seen: Path, made: Path, *, has_service: bool) -> None:
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy_grpc"
    service = (
        *(f"--grpc_python_out={made}", f"--mypy_grpc_out=quiet:{made}"),
        f"--plugin=protoc-gen-mypy_grpc={plugin}",
    )
    well_known = Path(str(resources.files("grpc_tools")), "_proto")
    failure = protoc.main(
        [
            *(
                "protoc",
                f"-I{seen}",
                f"-I{well_known}",
                f"--python_out={made}",
                f"--pyi_out={made}",
            ),
            *(service if has_service else ()),
            source,
        ]
    )
    if failure:
        raise SystemExit(f"protoc failed on {source} with code {failure}")


def stale(root: Path) -> list[str]:
    """The committed files that aren't what protoc makes of the source now."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        generate(root.resolve(), out)
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

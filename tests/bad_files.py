"""Files that no honest exporter writes, read by the readers of bundles and checkpoints.

Knows: the readers, where each file lies. Does not know: servers.
It runs as a process of its own (`python -m tests.bad_files`) with little memory, since what it
looks for may end the process. It prints a line before each input: one that kills it has a name.
"""

import argparse
import json
import logging
import os
import random
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quill.export.bundle.manifest import MANIFEST_FILE, describe_file
from quill.export.errors import ExportError
from quill.model.checkpoint.checkpoint import load_checkpoint
from quill.model.errors import ModelError
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.server.errors import ServerError
from quill.server.loading.loader import Loader
from quill.server.settings import Settings
from tests import good_files
from tests.server.bad_calls import FLOATS, INTEGERS, TEXTS, mutate

HANGS_S = 60  # of the processor's time: readers wait for nobody, and a machine may be slow
WAITS_S = 1200
MEMORY_BYTES = 2 * 2**30  # on top of what the libraries take
OUTSIDE = "outside"
SMALL = Settings(max_num_seqs=2, threads=1, kv_cache_mb=16, precision="fp32")
VALUES: tuple[Any, ...] = (None, True, [], {}, -1, 10**30, *INTEGERS, *FLOATS, *TEXTS)
VALUES += (f"../{OUTSIDE}", f"../../{OUTSIDE}", "/etc/passwd", [[[[]]]], "0" * 64)


class Target(NamedTuple):
    """A file to harm, and who reads it."""

    path: Path
    read: Callable[[], object]
    is_json: bool
    describe: bool = False  # the bundle's manifest is made to agree with it

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}" if self.is_inside else self.path.name

    @property
    def is_inside(self) -> bool:
        """Of a bundle or a checkpoint."""
        return self.path.parent.name in good_files.NAMES


def find_targets(directory: Path) -> list[Target]:
    """What tests/good_files.py wrote there."""
    bundle, checkpoint, gguf = (directory / name for name in good_files.NAMES)
    (directory / OUTSIDE).write_bytes(b"a secret")

    def serve() -> object:
        return Loader(bundle, SMALL).load()

    def restore() -> object:
        return load_checkpoint(checkpoint).build()

    def convert() -> object:
        return read_gguf(GgufFile(gguf))

    return [
        Target(bundle / MANIFEST_FILE, serve, is_json=True),
        Target(bundle / "tokenizer.json", serve, is_json=True, describe=True),
        Target(bundle / "decoder.fp32.onnx", serve, is_json=False, describe=True),
        Target(checkpoint / "config.json", restore, is_json=True),
        Target(checkpoint / "tokenizer.json", restore, is_json=True),
        Target(checkpoint / "model.safetensors", restore, is_json=False),
        Target(gguf, convert, is_json=False),
        Target(gguf, convert, is_json=False),
    ]


def harm(chance: random.Random, content: bytes, is_json: bool) -> bytes:
    if not is_json or chance.random() < 0.2:
        return mutate(chance, content, first=chance.choice((100, 3000, len(content))))
    if chance.random() < 0.02:
        return b'{"a":' * 100_000  # deeper than any reader may follow
    value = json.loads(content)
    for _ in range(chance.randint(1, 3)):
        _harm_value(chance, value)
    return json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")


def _harm_value(chance: random.Random, value: Any) -> None:
    """Somewhere inside: changed, taken out, or put in."""
    while isinstance(value, (dict, list)) and value:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], (dict, list)) or not value[key] or chance.random() < 0.2:
            if chance.random() < 0.2:
                del value[key]
            else:
                value[key] = chance.choice(VALUES)
            return
        value = value[key]


def try_one(chance: random.Random, target: Target) -> str:
    """Harms the file, reads it, and puts it back. What came of it, in a word."""
    before = target.path.read_bytes()
    manifest = target.path.parent / MANIFEST_FILE
    said = manifest.read_bytes() if target.describe else b""
    target.path.write_bytes(harm(chance, before, target.is_json))
    if target.describe:
        agree(target.path)
    try:
        target.read()
        return "read"
    except (ExportError, ModelError, ServerError) as error:
        if not str(error).strip():
            raise AssertionError("an error without a word") from error
        return type(error).__name__
    finally:
        target.path.write_bytes(before)
        if target.describe:
            manifest.write_bytes(said)


def agree(path: Path) -> None:
    """Whoever makes a hostile bundle gets its hashes right."""
    manifest = path.parent / MANIFEST_FILE
    value = json.loads(manifest.read_bytes())
    others = [file for file in value["files"] if file["name"] != path.name]
    value["files"] = [*others, vars(describe_file(path.parent, path.name))]
    manifest.write_text(json.dumps(value))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _refuse_outside(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        name = Path(os.fsdecode(arguments[0])).name
        # Not an Exception: nobody may take it for a file that can't be read.
        if name in (OUTSIDE, "passwd"):
            raise SystemExit(f"a file outside was opened: {arguments[0]!r}")


def _place(error: Exception) -> str:
    """Where in our code an error came up that isn't one of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_ours(frame)]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).parent.name in ("model", "export", "server", "tests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="what tests/good_files.py wrote")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=100)
    args = parser.parse_args()
    logging.disable()
    targets = find_targets(args.directory)
    for target in targets:
        target.read()
    _limit_memory()
    sys.addaudithook(_refuse_outside)
    outcomes: Counter[tuple[str, str]] = Counter()
    failures: dict[str, str] = {}  # the first at each place
    for number in range(args.first, args.first + args.inputs):
        target = targets[number % len(targets)]
        print(f"input {number} of seed {args.seed}: {target.path.name}", flush=True)
        signal.setitimer(signal.ITIMER_PROF, HANGS_S)  # ends the process
        signal.alarm(WAITS_S)
        try:
            answer = try_one(random.Random(f"{args.seed}/{number}"), target)
            outcomes[target.name, answer] += 1
        except Exception as error:
            failures.setdefault(_place(error), f"input {number}: {error!r}"[:500])
    print(json.dumps([(*key, count) for key, count in outcomes.items()]), flush=True)
    if failures:
        sys.exit("\n".join(f"{where}: {what}" for where, what in failures.items()))


if __name__ == "__main__":
    main()

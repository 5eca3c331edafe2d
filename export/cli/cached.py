"""`quill export`: into a directory, or into the cache, where `quill serve` finds it again.

Knows: what a bundle in the cache depends on, locks. Does not know: how bundles are made. It imports
torch only when something has to be made: a second start takes seconds, and works without torch.

A bundle's name in the cache has a hash: of the source's files, the options, the exporter's sources,
the operators' sources and ONNX Runtime's version. Whatever changes, another bundle is made.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quill.cache import cache_directory, cache_lock, free_cache_lock
from quill.export.bundle.manifest import Manifest, read_manifest
from quill.export.errors import BundleError, ExportError
from quill.export.operators.library import operators_are_fast
from quill.export.precisions import ALL_PRECISIONS, Precision
from quill.export.version import exporter_version
from quill.model.sources.hashes import remember, sha256_of
from quill.model.sources.kinds import Source, content_hash, find_source

MAX_LEFTOVER_AGE_S = 7 * 24 * 3600
_LEFTOVER = re.compile(r"\.(?P<label>.+)-(?P<key>[0-9a-f]{16})\.(parts|.+\.part)")


def run(args: argparse.Namespace) -> None:
    if args.precision not in (None, "all"):
        parse_precisions(args.precision)
    source = find_source(args.source)
    if source.kind == "bundle":
        raise BundleError(
            f"{args.source} is a bundle already. Serve it: quill serve {args.source}; or name what "
            "it was exported from"
        )
    if args.out is None:
        if args.add:
            raise ExportError("--add needs the bundle that it adds to: give --out BUNDLE")
        print(cached_bundle(source, args))
        return
    from quill.export.cli.export import export

    export(source, args.out, args)
    print(f"The bundle is in {args.out}")


def parse_precisions(wanted: str) -> tuple[Precision, ...]:
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in ALL_PRECISIONS:
            known = ", ".join((*ALL_PRECISIONS, "all"))
            raise ExportError(f"unknown precision {name!r}; there are {known}")
    return tuple(precision for precision in ALL_PRECISIONS if precision in names)


def bundles_directory() -> Path:
    return cache_directory() / "bundles"


class Leftover(NamedTuple):
    """What an export left in the cache that was killed, or goes on."""

    path: Path
    label: str
    key: str

    @property
    def is_old(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return time.time() - self.path.stat().st_mtime > MAX_LEFTOVER_AGE_S
        return False

    def remove(self) -> bool:
        """Whether it could be: an export that goes on has the lock of its bundle."""
        with free_cache_lock(self.key) as is_free:
            if is_free:
                shutil.rmtree(self.path, ignore_errors=True)
            return is_free


def leftovers() -> Iterator[Leftover]:
    for path in sorted(bundles_directory().glob(".*")):
        if found := _LEFTOVER.fullmatch(path.name):
            yield Leftover(path, found["label"], found["key"])


def cached_bundle(source: Source, args: argparse.Namespace) -> Path:
    """The bundle's directory. It is made if it isn't there, is damaged, or its source changed."""
    key = _key(source, args)
    source_label = source.label.replace("/", "--")
    name = f"{source_label}-{key}"
    # The same content may have been given by another name.
    with cache_lock(key):
        bundle = next(bundles_directory().glob(f"*-{key}"), bundles_directory() / name)
        if bundle.exists() and whole_bundle(bundle) is not None:
            return bundle
        _say(
            f"Preparing {source.label}: import, export and verification against PyTorch, once. The "
            "next start takes seconds."
        )
        shutil.rmtree(bundle, ignore_errors=True)
        for leftover in leftovers():
            # What was quantized for this very bundle is used again.
            if leftover.key == key and leftover.path.suffix != ".parts":
                shutil.rmtree(leftover.path, ignore_errors=True)
            elif leftover.key != key and (leftover.label == source_label or leftover.is_old):
                leftover.remove()
        from quill.export.cli.export import export

        export(source, bundle, args, name=source.label)
        remember({bundle / file.name: file.sha256 for file in read_manifest(bundle).files})
    return bundle


def whole_bundle(bundle: Path) -> Manifest | None:
    """None: it is damaged."""
    try:
        manifest = read_manifest(bundle)
        found = sha256_of([bundle / file.name for file in manifest.files])
        if [file.sha256 for file in manifest.files] != found:
            raise BundleError(f"{bundle} is damaged: the hash of a file is wrong")
    except (BundleError, OSError) as error:
        _say(f"{error}. It is made anew")
        return None
    return manifest


def _key(source: Source, args: argparse.Namespace) -> str:
    try:
        text = None if args.text is None else sha256_of([args.text])
    except OSError as error:
        raise ExportError(f"can't read --text {args.text}: {error.strerror}") from error
    options = [args.precision, args.verify, text, operators_are_fast()]
    parts = [content_hash(source), exporter_version(), _onnxruntime_version(), json.dumps(options)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _onnxruntime_version() -> str:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

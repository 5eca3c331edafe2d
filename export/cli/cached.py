"""`quill export`: into a directory, or into the cache, where `quill serve` finds it again.

Knows: what a bundle in the cache depends on, locks. Does not know: how bundles are made. It imports
torch only when something has to be made: a second start takes seconds, and works without torch.

A bundle's name in the cache has a hash: of the source's files, the options, the exporter's sources,
the operators' sources and ONNX Runtime's version. Whatever changes, another bundle is made.
"""

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import sys
from pathlib import Path

from quill.cache import cache_directory, cache_lock
from quill.export.bundle.manifest import Manifest, read_manifest
from quill.export.errors import BundleError, ExportError
from quill.export.operators.library import operators_are_fast
from quill.export.precisions import ALL_PRECISIONS, Precision
from quill.export.version import exporter_version
from quill.model.sources.hashes import remember, sha256_of
from quill.model.sources.kinds import Source, content_hash, find_source


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


def cached_bundle(source: Source, args: argparse.Namespace) -> Path:
    """The bundle's directory. It is made if it isn't there, is damaged, or its source changed."""
    key = _key(source, args)
    name = f"{source.label.replace('/', '--')}-{key}"
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
        for leftover in bundle.parent.glob(f".{bundle.name}.*.part"):  # of a killed process
            shutil.rmtree(leftover, ignore_errors=True)
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

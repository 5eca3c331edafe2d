"""What a user names, and what it is taken for; every dead end says what to do."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from quill.model.errors import SourceError
from quill.model.sources.catalogue import CATALOGUE
from quill.model.sources.kinds import KINDS, content_hash, find_source, locate


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def directory(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


def test_each_kind_is_told_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF....")
    ours, theirs = json.dumps({"format": 2}), json.dumps({"model_type": "llama"})
    given = {
        "bundle": directory(tmp_path / "b", manifest__json="{}"),
        "checkpoint": directory(tmp_path / "c", config__json=ours),
        "run": directory(tmp_path / "r", run__json="{}"),
        "huggingface": directory(tmp_path / "h", config__json=theirs),
        "gguf": tmp_path / "model.gguf",
        "catalogue": "smollm2-135m",
        "hub": "hf:org/name@v1:model.gguf",
    }
    assert {kind: find_source(str(each)).kind for kind, each in given.items()} == {
        kind: kind for kind in KINDS
    }


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("org/name", "Then write hf:org/name"),
        ("smollm2-135", "Did you mean smollm2-135m?"),
        ("none.gguf", "no file or directory 'none.gguf'"),
        ("hf:name", "isn't the name of a hub's model"),
        ("empty.gguf", "is empty: fetch it again"),
        ("empty", "is an empty directory"),
        ("ggufs", r"Give one: \S*ggufs/a.gguf"),
        ("other", "without manifest.json"),
        ("other/model.safetensors", r"Give the directory that it is in: \S*other"),
        ("note.md", "isn't a GGUF file"),
    ],
)
def test_a_dead_end_says_what_to_do(
    given: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.md").write_text("# A model")
    directory(tmp_path / "ggufs", a__gguf="GGUF", b__gguf="GGUF")
    directory(tmp_path / "other", model__safetensors="weights")
    with pytest.raises(SourceError, match=hint):
        find_source(given)


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "README.md"])
def test_a_device_or_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    """A link to /dev/zero took all memory; a pipe was waited for, for ever."""
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        model = directory(tmp_path / "m", config__json="{}")
        (model / name).unlink(missing_ok=True)
        make(model / name)
        with pytest.raises(SourceError, match="a device or a pipe"):
            find_source(str(model))
        shutil.rmtree(model)


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    run = directory(tmp_path / "run", run__json="{}")
    with pytest.raises(SourceError, match="has no checkpoint yet"):
        locate(find_source(str(run)))
    for step in (20, 100):
        directory(run / f"step-{step:08d}", config__json='{"format": 2}')
    assert locate(find_source(str(run))) == run / "step-00000100"


def test_the_hash_is_of_what_the_model_consists_of(tmp_path: Path) -> None:
    first = directory(tmp_path / "a", config__json="{}", model__safetensors="1", README__md="x")
    same = directory(tmp_path / "b", config__json="{}", model__safetensors="1")
    found = content_hash(find_source(str(first)))
    assert content_hash(find_source(str(same))) == found
    (same / "model.safetensors").write_text("2")
    assert content_hash(find_source(str(same))) != found


def test_a_copy_of_the_catalogues_file_has_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF" + bytes(100)
    (tmp_path / "copy.gguf").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    model = CATALOGUE["smollm2-135m"]._replace(sha256=sha256)
    monkeypatch.setitem(CATALOGUE, model.name, model)
    copy = find_source(str(tmp_path / "copy.gguf"))
    assert content_hash(copy) == content_hash(find_source(model.name))


def test_a_file_that_did_not_change_is_not_read_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    found = content_hash(find_source(str(path)))
    monkeypatch.setattr("quill.model.sources.hashes._hash", lambda *_: "read again")
    assert content_hash(find_source(str(path))) == found
    path.write_bytes(b"GGUF" + b"x" * 100)
    assert content_hash(find_source(str(path))) != found
    monkeypatch.undo()
    monkeypatch.setenv("QUILL_CACHE", str(cache))
    (cache / "hashes.json").write_text("[broken")
    path.write_bytes(b"GGUF" + bytes(100))
    assert content_hash(find_source(str(path))) == found

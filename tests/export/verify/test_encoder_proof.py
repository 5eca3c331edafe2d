"""An encoder's proof: what holds is written down, and what doesn't is refused."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from quill.export.errors import VerificationError
from quill.export.verify.encoder_proof import EncoderProof, measure_invariance, questions
from quill.export.verify.encoder_runner import EncoderRunner, Read
from quill.export.verify.held_out import HeldOut, Passage, held_out
from tests.export.tiny import ENCODER, Exported, export, make_checkpoint
from tests.operators import OWN, SERVED

TEXT = HeldOut("chance", [Passage((0, *range(10, 40), 1)), Passage((0, 50, 51, 52, 1))])


@pytest.mark.parametrize("precision", SERVED)
def test_every_precision_is_proven(encoder: Exported, precision: str) -> None:
    graphs = encoder.manifest.graphs_in(precision)
    assert graphs.verification is not None
    assert graphs.invariance is not None
    assert graphs.invariance.holds
    assert graphs.verification.num_tokens > 100
    if precision == "fp32":
        assert graphs.verification.worst_difference < 1e-4
        assert graphs.verification.greedy_agreement == 1.0


def test_the_same_tokens_are_hidden_every_time(encoder: Exported) -> None:
    first, again = (questions(encoder.checkpoint, TEXT) for _ in range(2))
    assert first == again
    for question in first:
        assert question.places
        assert question.ids[0] == 0
        assert question.ids[-1] == 1, "what frames a text is never hidden"


def test_passages_begin_and_end_as_texts_do(encoder: Exported, text: Path) -> None:
    for passage in held_out(encoder.checkpoint, text).passages:
        assert (passage.ids[0], passage.ids[-1], len(passage.ids)) == (0, 1, ENCODER.context)


def test_without_a_head_hidden_states_alone_are_compared(tmp_path: Path) -> None:
    config = replace(ENCODER, masked_head=False, output_bias=False, num_segments=0)
    found = export(tmp_path / "out", make_checkpoint(config), "fp32", *OWN).manifest
    for graphs in found.graphs:
        assert graphs.verification is not None
        assert graphs.verification.reference_perplexity == pytest.approx(1.0)
        assert graphs.verification.perplexity == pytest.approx(1.0, abs=0.05)
        assert graphs.verification.text == "tokens by chance"


def test_a_damaged_graph_is_refused(encoder: Exported, tmp_path: Path) -> None:
    shutil.copytree(encoder.directory, tmp_path, dirs_exist_ok=True)
    graphs = encoder.manifest.graphs_in("fp32")
    assert graphs.encoder is not None
    model = onnx.load(tmp_path / graphs.encoder)
    node = next(node for node in model.graph.node if node.op_type == "EncoderAttention")
    scale = next(each for each in node.attribute if each.name == "scale")
    scale.f *= 2
    onnx.save(model, tmp_path / graphs.encoder)
    proof = EncoderProof(encoder.checkpoint, TEXT, lambda: None)
    with pytest.raises(VerificationError, match="the fp32 graph doesn't compute"):
        proof.prove(tmp_path, encoder.manifest.sizes, graphs, graphs, None, lambda: None)


class Leaning(EncoderRunner):
    """Adds a tiny part of the number of texts to what it reads."""

    def read(
        self, texts: Sequence[Sequence[int]], places: Sequence[Sequence[int]] | None = None
    ) -> list[Read]:
        return [
            Read(each.hidden_TD + np.float32(1e-6 * len(texts)), each.logits_LV)
            for each in super().read(texts, places)
        ]


def test_a_text_that_depends_on_its_company_is_seen(encoder: Exported) -> None:
    graphs, sizes = encoder.manifest.graphs_in("fp32"), encoder.manifest.sizes
    asked = questions(encoder.checkpoint, TEXT)
    assert measure_invariance(EncoderRunner(encoder.directory, graphs, sizes), asked).holds
    assert not measure_invariance(Leaning(encoder.directory, graphs, sizes), asked).holds

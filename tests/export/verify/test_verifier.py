"""Verification of each precision: how much is measured, what is recorded, what is rejected."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from quill.export.errors import VerificationError
from quill.export.verify.batch_invariance import measure_encoder_invariance
from quill.export.verify.decoder_verifier import enough
from quill.export.verify.encoder_verifier import EncoderVerifier
from quill.export.verify.held_out import HeldOut, Passage, held_out, mask_passages
from quill.export.verify.runner import EncoderOutput, EncoderRunner
from quill.export.verify.verifier import Candidate
from tests.export.tiny import Exported, changed, export, make_checkpoint
from tests.operators import OWN, SERVED
from tests.tiny_networks import ENCODER

TEXT = HeldOut("chance", [Passage((0, *range(10, 40), 1)), Passage((0, 50, 51, 52, 1))])

PASSAGES = [Passage((1,) * length) for length in (10, 20, 30)]


def test_short_passages_are_taken_until_there_are_tokens_enough() -> None:
    assert enough(PASSAGES, None) == PASSAGES
    assert enough(PASSAGES, 1) == PASSAGES[:1]
    assert enough(PASSAGES, 10) == PASSAGES[:1]
    assert enough(PASSAGES, 11) == PASSAGES[:2]
    assert enough(PASSAGES, 1000) == PASSAGES


@pytest.mark.parametrize("precision", SERVED)
def test_every_precision_is_verified(encoder: Exported, precision: str) -> None:
    graphs = encoder.manifest.graphs_in(precision)
    assert graphs.verification is not None
    assert graphs.invariance is not None
    assert graphs.invariance.holds
    assert graphs.verification.num_tokens > 100
    if precision == "fp32":
        assert graphs.verification.worst_difference < 1e-4
        assert graphs.verification.greedy_agreement == 1.0


def test_the_same_tokens_are_masked_every_time(encoder: Exported) -> None:
    first, again = (mask_passages(encoder.checkpoint, TEXT) for _ in range(2))
    assert first == again
    for masked in first:
        assert masked.places
        assert masked.ids[0] == 0
        assert masked.ids[-1] == 1, "special tokens are never masked"


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
        assert graphs.verification.text == "random tokens"


def test_a_damaged_graph_is_refused(encoder: Exported, tmp_path: Path) -> None:
    def sharpen(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "EncoderAttention")
        next(each for each in node.attribute if each.name == "scale").f *= 2

    graphs = changed(encoder, tmp_path, sharpen, "encoder")
    verifier = EncoderVerifier(encoder.checkpoint, encoder.manifest.sizes, TEXT)
    with pytest.raises(VerificationError, match="the fp32 graph doesn't compute"):
        verifier.verify(Candidate(tmp_path, graphs, graphs, None), lambda: None)


class BatchDependent(EncoderRunner):
    """Adds a tiny part of the number of texts to the hidden states."""

    def encode(
        self, texts: Sequence[Sequence[int]], places: Sequence[Sequence[int]] | None = None
    ) -> list[EncoderOutput]:
        return [
            EncoderOutput(each.hidden_TD + np.float32(1e-6 * len(texts)), each.logits_LV)
            for each in super().encode(texts, places)
        ]


def test_an_encoder_that_is_not_batch_invariant_is_detected(encoder: Exported) -> None:
    graphs, sizes = encoder.manifest.graphs_in("fp32"), encoder.manifest.sizes
    texts = [passage.ids for passage in TEXT.passages]
    assert measure_encoder_invariance(EncoderRunner(encoder.directory, graphs, sizes), texts).holds
    assert not measure_encoder_invariance(
        BatchDependent(encoder.directory, graphs, sizes), texts
    ).holds

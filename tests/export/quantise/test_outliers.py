"""Finding the few inputs that are far larger than the rest."""

import torch

from quill.export.quantise.outliers import MAX_OUTLIERS, find_outliers
from quill.model.checkpoint.checkpoint import Checkpoint
from tests.export.tiny import LLAMA, SEQ2SEQ, make_checkpoint

QKV = "decoder.0.attention.qkv.weight"


def test_loud_channels_are_found_and_no_others() -> None:
    checkpoint = make_checkpoint(LLAMA)
    loud = [5, 33, 60]
    checkpoint.weights["decoder.0.attention_residual.norm.weight"][loud] *= 50
    assert find_outliers(checkpoint)[QKV].tolist() == loud


def equally_loud() -> Checkpoint:
    """The first layer reads channels of plus and minus one."""
    checkpoint = make_checkpoint(LLAMA)
    signs = torch.rand(LLAMA.vocab_size, LLAMA.d_model) < 0.5
    checkpoint.weights["embedding.weight"][:] = torch.where(signs, -1.0, 1.0)
    checkpoint.weights["decoder.0.attention_residual.norm.weight"][:] = 1
    return checkpoint


def test_only_the_loudest_of_many_are_taken() -> None:
    checkpoint = equally_loud()
    norm = checkpoint.weights["decoder.0.attention_residual.norm.weight"]
    norm[:MAX_OUTLIERS] = 100
    norm[MAX_OUTLIERS : MAX_OUTLIERS + 2] = 80
    assert find_outliers(checkpoint)[QKV].tolist() == list(range(MAX_OUTLIERS))


def test_channels_of_equal_loudness_are_left_alone() -> None:
    assert QKV not in find_outliers(equally_loud())


def test_the_tied_vocabulary_projection_and_both_stacks_are_looked_at() -> None:
    checkpoint = make_checkpoint(SEQ2SEQ)
    for name, tensor in checkpoint.weights.items():
        if name.endswith("norm.weight"):
            tensor[7] *= 50
    found = find_outliers(checkpoint)
    for name in ("embedding.weight", "encoder.0.feed_forward.up.weight"):
        assert 7 in found[name].tolist()

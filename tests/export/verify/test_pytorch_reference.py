"""PyTorch's side of the comparison."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quill.export.quantize.matrices import QuantizedMatrices
from quill.export.verify.held_out import Passage
from quill.export.verify.probe_attention import past_split
from quill.export.verify.pytorch_reference import Job, PyTorchReference, run_jobs
from quill.export.verify.token_scores import concatenate, kl_divergence, score_sequence
from quill.model.network.attention import KeyValue
from quill.model.network.layers import EncoderLayer
from tests.export.tiny import make_checkpoint, quantized_at_source
from tests.tiny_networks import LLAMA, SEQ2SEQ


def test_the_nll_of_a_fair_coin_is_one_bit_a_toss() -> None:
    found = score_sequence(np.zeros((4, 2), np.float32), [0, 1, 1, 0])
    np.testing.assert_allclose(found.nll, np.log(2) * np.ones(3))
    assert found.perplexity == pytest.approx(2)


def test_the_nll_follows_the_likelihood_of_the_next_token() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]))
    found = score_sequence(logits, [0, 1, 2])
    np.testing.assert_allclose(found.nll, -np.log([0.2, 0.1]))
    np.testing.assert_array_equal(found.greedy_ids, [0, 1])


def test_huge_logits_do_not_overflow() -> None:
    found = score_sequence(np.array([[1e5, 0.0], [0.0, 1e5]], np.float32), [0, 0])
    assert found.perplexity == pytest.approx(1)


def test_every_token_has_the_same_weight() -> None:
    parts = [score_sequence(np.zeros((n, 4), np.float32), [0] * n) for n in (2, 5)]
    assert len(concatenate(parts).nll) == 1 + 4


def test_a_position_far_from_itself_diverges_and_a_shifted_one_does_not() -> None:
    expected = np.log(np.array([[0.5, 0.5], [0.9, 0.1]]))
    found = np.log(np.array([[0.5, 0.5], [0.1, 0.9]])) + 7
    divergence = 0.9 * np.log(9) + 0.1 * np.log(1 / 9)
    np.testing.assert_allclose(kl_divergence(found, expected), [0, divergence], atol=1e-12)


def test_layer_by_layer_pytorch_computes_what_the_whole_network_computes() -> None:
    checkpoint = make_checkpoint(LLAMA)
    passages = [Passage((5, 6, 7, 8)), Passage((1, 2, 3)), Passage((9, 8, 7)), Passage((4, 4))]
    reference = PyTorchReference(checkpoint)
    for number, output in enumerate(reference.outputs(passages, num_cached=1)):
        with torch.no_grad():
            expected = checkpoint.build()(torch.tensor([output.passage.ids]))[0].numpy()
        assert output.passage == passages[number]
        np.testing.assert_allclose(reference.project(output.hidden_TD), expected, atol=1e-4)
        assert [cache.shape for cache in output.caches] == [(2, 4, 16)] * (0 if number else 4)
        assert output.cross_caches == []


def test_jobs_with_the_same_weights_read_each_layer_once_and_compute_what_each_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    matrices = QuantizedMatrices(checkpoint, 4, tmp_path)
    matrices.read_all()
    quantization, source = matrices.quantization(), PyTorchReference(checkpoint)
    texts, probes = [Passage((5, 6, 7, 8)), Passage((1, 2))], [Passage((9, 8, 7)), Passage((4, 4))]
    expected = [
        source.outputs(texts),
        PyTorchReference(checkpoint, quantization).outputs(probes, num_cached=2),
    ]
    layers: list[int] = []
    read = PyTorchReference._layer

    def counted(reference: PyTorchReference, index: int) -> EncoderLayer:
        layers.append(index)
        return read(reference, index)

    monkeypatch.setattr(PyTorchReference, "_layer", counted)
    rounding = source.rounding_as(quantization)
    found = run_jobs([Job(source, texts), Job(rounding, probes, num_cached=2)])
    assert layers == list(range(LLAMA.num_layers))
    for ours, theirs in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        np.testing.assert_array_equal(ours.hidden_TD, theirs.hidden_TD)
        np.testing.assert_array_equal(ours.caches, theirs.caches)
    hidden_TD = found[1][0].hidden_TD
    assert not np.array_equal(rounding.project(hidden_TD), source.project(hidden_TD))


@pytest.mark.parametrize("window", [0, 24])
def test_a_past_of_repeated_blocks_is_attended_to_as_if_it_were_written_out(window: int) -> None:
    checkpoint = make_checkpoint(replace(LLAMA, window=window))
    random = np.random.default_rng(0)
    first, second = (tuple(random.integers(0, 272, 20).tolist()) for _ in range(2))
    passages = [Passage(first), Passage(second), Passage((3, 4, 5), past=64)]
    far = PyTorchReference(checkpoint).outputs(passages, num_cached=3)[2]
    model = checkpoint.build()
    attention = model.cached()
    with torch.no_grad():
        blocks = []
        for ids in (second, first):
            one = model.cached()
            model.hidden(torch.tensor([ids]), one)
            blocks.append([one.key_value(layer) for layer in range(LLAMA.num_layers)])
        num_second = past_split(64, window) // 16
        for layer in range(LLAMA.num_layers):
            parts = [blocks[0][layer]] * num_second + [blocks[1][layer]] * (4 - num_second)
            sides = [torch.cat([part[side][:, :, :16] for part in parts], 2) for side in (0, 1)]
            attention._layers[layer] = KeyValue(*sides)  # type: ignore[attr-defined]
        attention._length = 64  # type: ignore[attr-defined]
        expected = model.hidden(torch.tensor([passages[2].ids]), attention)[0].numpy()
    np.testing.assert_allclose(far.hidden_TD, expected, atol=1e-4)


def test_every_layer_has_keys_and_values_of_the_source() -> None:
    passage = Passage((1, 2), source=(3, 4, 5))
    (answer,) = PyTorchReference(make_checkpoint(SEQ2SEQ)).outputs([passage])
    assert [cache.shape for cache in answer.cross_caches] == [(4, 3, 16)] * 4


def test_greedy_takes_the_most_likely_token_each_time() -> None:
    reference = PyTorchReference(make_checkpoint(SEQ2SEQ))
    found = reference.greedy(Passage((5, 6), source=(3, 4)), 4)
    (output,) = reference.outputs([found])
    greedy_ids = reference.project(output.hidden_TD).argmax(axis=1)
    assert found.ids[:2] == (5, 6)
    assert found.ids[2:] == tuple(greedy_ids[1:5].tolist())

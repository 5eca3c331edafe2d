"""CTranslate2 as a backend: language models, and translation models with a checkpoint's weights.

    python -m quill.loadtest.bench.backends.ctranslate2 DIRECTORY KIND THREADS
    python -m quill.loadtest.bench.backends.ctranslate2 CHECKPOINT KIND THREADS translate

Knows: its generator, its model specification, a checkpoint's tensors. Runs in the peers' virtual
environment. A translation model's weights are written in its own format, with fused projections.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec
from safetensors.numpy import load_file

from quill.loadtest.bench.backends.protocol import (
    MAX_NEW_TOKENS,
    BackendInfo,
    Logits,
    Score,
    Translated,
    model_arguments,
    score_passages,
    serve,
    size_of,
)

Weights = Mapping[str, Any]


class Generator:
    """It decodes whole answers only, so the clock is read when its steps report."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        self.info = BackendInfo("CTranslate2", kind, ctranslate2.__version__, size_of(path))
        self._generator = ctranslate2.Generator(
            str(path), device="cpu", compute_type=kind, inter_threads=1, intra_threads=num_threads
        )
        words = (path / "vocabulary.json").read_text(encoding="utf-8")
        self._words: list[str] = json.loads(words)

    def prefill(self, ids: Sequence[int]) -> float:
        start = time.perf_counter()
        self._generate([ids], 1, [])
        return time.perf_counter() - start

    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        times: list[float] = []
        # Two steps before the clock: the first reads the prompts.
        self._generate([ids] * num_seqs, num_steps + 2, times)
        return times[(num_steps + 2) * num_seqs - 1] - times[2 * num_seqs - 1]

    def score(self, passages: Sequence[Sequence[int]], reference: str | None = None) -> Score:
        return score_passages(passages, reference, self._logprobs)

    def _logprobs(self, ids: Sequence[int]) -> Logits:
        output = self._generator.forward_batch([list(ids)], return_log_probs=True)
        logprobs_TV: Logits = np.array(output)[0]
        return logprobs_TV

    def _generate(self, rows: Sequence[Sequence[int]], num: int, times: list[float]) -> None:
        def note(_: object) -> bool:
            times.append(time.perf_counter())
            return False

        self._generator.generate_batch(
            [[self._words[token] for token in ids] for ids in rows],
            max_length=num,
            min_length=num,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=note,
        )


def make_spec(shape: Mapping[str, Any], special: Mapping[str, int], weights: Weights) -> Any:
    """A checkpoint's network as CTranslate2 describes it."""
    layers = (shape["num_encoder_layers"], shape["num_layers"])
    activation = getattr(common_spec.Activation, {"silu": "SWISH"}.get(shape["activation"], "RELU"))
    spec = transformer_spec.TransformerSpec.from_config(
        layers, shape["num_heads"], pre_norm=False, activation=activation
    )
    table_PD = sinusoids(shape["context"], shape["d_model"])
    embedding = weights["embedding.weight"]
    for side in (spec.encoder, spec.decoder):
        side.scale_embeddings = shape["scale_embeddings"]
        side.position_encodings.encodings = table_PD
    spec.encoder.embeddings[0].weight = embedding
    spec.decoder.embeddings.weight = embedding
    spec.decoder.projection.weight = embedding
    if "output_bias" in weights:
        spec.decoder.projection.bias = weights["output_bias"]
    for name, side in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        for index, layer in enumerate(side.layer):
            _set_layer(layer, weights, f"{name}.{index}")
    words = [f"w{index}" for index in range(shape["vocab_size"])]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = spec.config.decoder_start_token = words[special["bos"]]
    spec.config.eos_token = words[special["eos"]]
    spec.config.unk_token = words[0]
    spec.config.add_source_eos = False
    return spec


def sinusoids(num_positions: int, d_model: int) -> Any:
    frequency_F = 10_000.0 ** (-np.arange(0, d_model, 2) / d_model)
    angle_PF = np.arange(num_positions)[:, None] * frequency_F
    table = np.stack((np.sin(angle_PF), np.cos(angle_PF)), axis=2).reshape(num_positions, d_model)
    return table.astype(np.float32)


def _set_layer(layer: Any, weights: Weights, name: str) -> None:
    attention = layer.self_attention
    _set_linear(attention.linear[0], weights, f"{name}.attention.qkv")
    _set_linear(attention.linear[1], weights, f"{name}.attention.out")
    _set_norm(attention.layer_norm, weights, f"{name}.attention_residual.norm")
    if f"{name}.cross.query.weight" in weights:
        parts = zip(layer.attention.linear, ("query", "key_value", "out"), strict=True)
        for linear, part in parts:
            _set_linear(linear, weights, f"{name}.cross.{part}")
        _set_norm(layer.attention.layer_norm, weights, f"{name}.cross_residual.norm")
    _set_linear(layer.ffn.linear_0, weights, f"{name}.feed_forward.up")
    _set_linear(layer.ffn.linear_1, weights, f"{name}.feed_forward.down")
    _set_norm(layer.ffn.layer_norm, weights, f"{name}.feed_forward_residual.norm")


def _set_linear(linear: Any, weights: Weights, name: str) -> None:
    linear.weight = weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias")
    linear.bias = np.zeros(len(linear.weight), np.float32) if bias is None else bias


def _set_norm(norm: Any, weights: Weights, name: str) -> None:
    norm.gamma, norm.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]


class Translator:
    """It takes a batch at once, and answers when the last of it is done."""

    def __init__(self, checkpoint: Path, kind: str, num_threads: int) -> None:
        described = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        weights = load_file(checkpoint / "model.safetensors")
        spec = make_spec(described["model"], described["special_tokens"], weights)
        with tempfile.TemporaryDirectory() as directory:
            spec.validate()
            spec.optimize(quantization=kind)
            spec.save(directory)
            size = size_of(Path(directory))
            self.info = BackendInfo("CTranslate2", kind, ctranslate2.__version__, size)
            self._translator = ctranslate2.Translator(
                directory, device="cpu", compute_type=kind, intra_threads=num_threads
            )

    def translate(
        self, sources: Sequence[Sequence[int]], num_beams: int, num_at_once: int
    ) -> Translated:
        start = time.perf_counter()
        answers: list[list[int]] = []
        for first in range(0, len(sources), num_at_once):
            batch = [[f"w{id}" for id in each] for each in sources[first : first + num_at_once]]
            found = self._translator.translate_batch(
                batch, beam_size=num_beams, max_decoding_length=MAX_NEW_TOKENS
            )
            answers += [[int(word[1:]) for word in each.hypotheses[0]] for each in found]
        return Translated(time.perf_counter() - start, answers)


if __name__ == "__main__":
    arguments = model_arguments(sys.argv)
    serve(Translator(*arguments) if "translate" in sys.argv[4:] else Generator(*arguments))

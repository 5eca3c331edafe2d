"""The reference: what PyTorch computes with the same weights, one layer in memory at a time.

Knows: the network in float32, how operators round a matrix's inputs.
Does not know: ONNX, tolerances.

A causal Transformer's layers are read one after another, and all passages pass through a layer
before the next one is read. Other networks are small, and are read whole.

With a quantization the reference rounds as the operators do: a matrix's inputs to 8 or 16 bits, the
KV cache to float16. What remains is the order of sums, so that small faults of a graph are seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quill.export.quantize.quantization import Quantization, dequantized
from quill.export.verify.held_out import MaskedText, Passage
from quill.export.verify.runner import EncoderOutput
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.quantized_weight import BLOCK_SIZE
from quill.model.network.attention import (
    CachedAttention,
    CrossKeyValue,
    KeyValue,
    as_state,
    attention_weights,
    causal_conv,
    causal_mask,
    from_state,
    merge_heads,
    repeat_groups,
    soft_capped,
    split_qkv,
)
from quill.model.network.layers import EncoderLayer
from quill.model.network.network import Network
from quill.model.network.networks import make_network
from quill.model.network.positions import tables_of
from quill.model.network.transformer import Transformer

# T tokens · V vocabulary · D model size

Array = npt.NDArray[Any]
Tick = Callable[[], None]

LEVELS = {8: 127.0, 16: 32767.0}
PAST_BLOCK = 16  # positions of the blocks that a far passage's past repeats
BATCH_TOKENS = 1024  # that pass through a layer together
VOCABULARY_ROWS = 1 << 13  # of the vocabulary's matrix that are in float32 at a time


@dataclass(frozen=True)
class ReferenceOutput:
    """PyTorch's hidden states after each token of a passage, and its KV cache."""

    passage: Passage
    hidden_TD: Array
    caches: list[Array] = field(default_factory=list)  # key 0, value 0, … (kv_heads, length, size)
    cross_caches: list[Array] = field(default_factory=list)  # of the source; empty for causal


def rounded(x: Tensor, bits: int) -> Tensor:
    """Rounds as the operators do: 32 numbers share a scale."""
    blocks = x.unflatten(-1, (-1, BLOCK_SIZE))  # type: ignore[no-untyped-call]
    scale = blocks.abs().amax(dim=-1, keepdim=True) / LEVELS[bits]
    y: Tensor = torch.where(scale > 0, (blocks / scale).round() * scale, 0.0).flatten(-2)
    return y


BitsOf = Callable[[str], int | None]  # of a matrix, by name; None: its inputs aren't rounded


def _round_inputs(name: str, module: nn.Module, input_bits: BitsOf) -> None:
    """Makes the linear layers of a module round their inputs."""
    for child_name, child in module.named_modules():
        bits = input_bits(f"{name}.{child_name}.weight".removeprefix("."))
        if isinstance(child, nn.Linear) and bits is not None:
            child.register_forward_pre_hook(
                lambda _, inputs, bits=bits: (rounded(inputs[0], bits),)
            )


def _of_quantization(quantization: Quantization | None) -> BitsOf:
    """How finely the inputs of each matrix are rounded; if rows differ in that, the coarsest."""

    def find(name: str) -> int | None:
        if quantization is None or name not in quantization.weights:
            return None
        weight = quantization.weights[name]
        return min(weight.bits_beside(rows) for rows in weight.weight.rows())

    return find


class Projection:
    """Hidden states become logits; the vocabulary's matrix is in float32 a few rows at a time."""

    def __init__(self, checkpoint: Checkpoint, model: Network, bits: int | None) -> None:
        name = "embedding.weight" if model.projection is None else "projection.weight"
        self._model = model
        self._bits = bits
        self._rows = _rows_of(checkpoint, name)

    @torch.no_grad()
    def __call__(self, hidden_LD: Array) -> Array:
        model, x_LD = self._model, torch.from_numpy(np.ascontiguousarray(hidden_LD))
        if model.config.num_classes:
            of_classes: Array = model.project(x_LD).numpy()
            return of_classes
        if isinstance(model, Transformer):
            x_LD = model.head(x_LD)
        if self._bits is not None:
            x_LD = rounded(x_LD, self._bits)
        bias_V, size = model.output_bias, model.config.vocab_size
        logits_LV = torch.empty(len(x_LD), size)
        for start in range(0, size, VOCABULARY_ROWS):
            end = min(start + VOCABULARY_ROWS, size)
            bias = None if bias_V is None else bias_V[start:end]
            logits_LV[:, start:end] = F.linear(x_LD, self._rows(start, end), bias)
        cap = model.config.logit_soft_cap
        found: Array = (soft_capped(logits_LV, cap) if cap else logits_LV).numpy()
        return found

    @torch.no_grad()
    def backward(self, gradient_LV: Tensor) -> Tensor:
        """The gradient of hidden states from that of logits, before they are soft-capped."""
        gradient_LD = torch.zeros(len(gradient_LV), self._model.config.d_model)
        for start in range(0, gradient_LV.shape[1], VOCABULARY_ROWS):
            end = min(start + VOCABULARY_ROWS, gradient_LV.shape[1])
            gradient_LD += gradient_LV[:, start:end] @ self._rows(start, end)
        return gradient_LD


def _rows_of(checkpoint: Checkpoint, name: str) -> Callable[[int, int], Tensor]:
    """Neighbouring rows of a matrix in float32; the matrix is kept as its source has it."""
    if name not in checkpoint.quantized:
        weight_NI = checkpoint.weights[name]
        return lambda start, end: weight_NI[start:end].float()
    weight = checkpoint.quantized[name]
    if weight.raw.ndim != 2:
        values_NI = weight.dequantize()
        return lambda start, end: values_NI[start:end]
    return lambda start, end: weight.dequantize_rows(torch.arange(start, end))


class PyTorchReference:
    """The checkpoint's network in PyTorch. `quantization`: of the graphs that are compared.
    `input_bits`: how inputs are rounded, if not as with the quantization."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: Quantization | None = None,
        input_bits: BitsOf | None = None,
    ) -> None:
        if quantization is not None:
            checkpoint = dequantized(checkpoint, quantization)
        self._checkpoint = checkpoint
        self._input_bits = input_bits or _of_quantization(quantization)
        self._halves = quantization is not None
        self._streams = (
            checkpoint.config.family == "causal" and checkpoint.config.recurrence is None
        )
        self._model = self._without_layers() if self._streams else checkpoint.build()
        if not self._streams:
            _round_inputs("", self._model, self._input_bits)
        name = "embedding" if self._model.projection is None else "projection"
        bits = self._input_bits(f"{name}.weight")
        self.project = Projection(checkpoint, self._model, bits)

    def num_ticks(self, num_passages: int) -> int:
        """Of `outputs`."""
        return self._model.config.num_layers if self._streams else num_passages

    def outputs(
        self, passages: Sequence[Passage], *, num_cached: int = 0, tick: Tick = lambda: None
    ) -> list[ReferenceOutput]:
        """Of all passages; of the first `num_cached` with their KV cache. Passages that begin far
        from the start continue the first blocks of the first two."""
        if self._streams:
            return self._by_layers(passages, num_cached, tick)
        found = []
        for passage in passages:
            found.append(self._output(passage))
            tick()
        return found

    def _without_layers(self) -> Transformer:
        """The network but for its layers and the vocabulary's matrices."""
        with torch.device("meta"):
            model = make_network(self._checkpoint.config).requires_grad_(False).eval()
        assert isinstance(model, Transformer)
        weights = self._checkpoint.weights
        large = ("decoder.", "embedding.weight", "projection.weight")
        names = [name for name in weights if not name.startswith(large)]
        state = {name: weights[name].float() for name in names}
        model.load_state_dict(state, assign=True, strict=False)
        model.compute_tables()
        return model

    @torch.no_grad()
    def _by_layers(
        self, passages: Sequence[Passage], num_cached: int, tick: Tick
    ) -> list[ReferenceOutput]:
        model = self._model
        assert isinstance(model, Transformer)
        ids_U = self._load_embedding(passages)
        runs: list[_Run] = []
        for passage in passages[:num_cached]:
            attention = ProbeAttention(model.config, model.rotary, passage.past, self._halves, runs)
            runs.append(_Run(model, ids_U, [passage], attention))
        for some in _batches(passages[num_cached:]):
            runs.append(_Run(model, ids_U, some, model.uncached()))
        for index in range(model.config.num_layers):
            layer = self._layer(index)
            for run in runs:
                run.x_BTD = layer(run.x_BTD, index, run.attention)
            tick()
        return [output for run in runs for output in run.outputs(model)]

    def _load_embedding(self, passages: Sequence[Passage]) -> Tensor:
        """Gives the model the embeddings of the tokens that occur. Returns these tokens."""
        model = self._model
        ids_U = torch.tensor(sorted({token for passage in passages for token in passage.ids}))
        model.embedding = nn.Embedding(
            len(ids_U), model.config.d_model, _weight=self._embedded(ids_U)
        )
        return ids_U

    def _embedded(self, ids_U: Tensor) -> Tensor:
        name, checkpoint = "embedding.weight", self._checkpoint
        if name in checkpoint.quantized and checkpoint.quantized[name].raw.ndim == 2:
            return checkpoint.quantized[name].dequantize_rows(ids_U)
        return checkpoint.weights[name][ids_U].float()

    def _layer(self, index: int) -> EncoderLayer:
        """A layer with its weights."""
        model, name = self._model, f"decoder.{index}"
        assert isinstance(model, Transformer)
        with torch.device("meta"):
            layer = model.make_layer(index).requires_grad_(False).eval()
        weights = self._checkpoint.weights
        state = {each: weights[f"{name}.{each}"].float() for each in layer.state_dict()}
        layer.load_state_dict(state, assign=True)
        _round_inputs(name, layer, self._input_bits)
        return layer

    @torch.no_grad()
    def _output(self, passage: Passage) -> ReferenceOutput:
        cross = self._encode(passage)
        attn_impl = self._model.cached(cross)
        hidden_1TD = self._model.hidden(_batch_of_one(passage.ids), attn_impl)
        layers = [attn_impl.key_value(i) for i in range(self._model.config.num_layers)]
        source = [] if cross is None else cross.layers
        return ReferenceOutput(
            passage=passage,
            hidden_TD=hidden_1TD[0].numpy(),
            caches=[side[0].numpy() for pair in layers for side in pair],
            cross_caches=[side[0].numpy() for pair in source for side in pair],
        )

    @torch.no_grad()
    def greedy(self, passage: Passage, num_steps: int) -> Passage:
        """The passage continued by greedy decoding."""
        if num_steps == 0:
            return passage
        assert not self._streams, "passages of a causal model are long enough"
        attn_impl = self._model.cached(self._encode(passage))
        ids, new = list(passage.ids), list(passage.ids)
        for _ in range(num_steps):
            x_BTD = self._model.hidden(_batch_of_one(new), attn_impl)
            new = [int(self._model.project(x_BTD[:, -1]).argmax())]
            ids += new
        return Passage(tuple(ids), passage.source)

    @torch.no_grad()
    def encode(self, text: MaskedText) -> EncoderOutput:
        """An encoder's hidden states, and its logits at the masked tokens."""
        assert isinstance(self._model, Transformer)
        hidden_TD = self._model.hidden_states(_batch_of_one(text.ids))[0]
        return EncoderOutput(hidden_TD.numpy(), self.project(hidden_TD[list(text.places)].numpy()))

    def _encode(self, passage: Passage) -> CrossKeyValue | None:
        if not passage.source:
            return None
        source_1S = _batch_of_one(passage.source)
        return self._model.encode(source_1S, torch.ones_like(source_1S, dtype=torch.bool))


class _Run:
    """Passages of one length on their way through the layers."""

    def __init__(
        self, model: Transformer, ids_U: Tensor, passages: Sequence[Passage], attention: Any
    ) -> None:
        self.attention = attention
        self._passages = passages
        ids_BT = torch.searchsorted(ids_U, torch.tensor([list(each.ids) for each in passages]))
        self.x_BTD = model.embed(ids_BT, attention)

    def outputs(self, model: Transformer) -> list[ReferenceOutput]:
        hidden_BTD, caches = model.decoder_norm(self.x_BTD).numpy(), []
        if isinstance(self.attention, ProbeAttention):
            layers = [self.attention.key_value(i) for i in range(model.config.num_layers)]
            caches = [side[0].numpy() for pair in layers for side in pair]
        return [
            ReferenceOutput(passage, hidden_TD, caches)
            for passage, hidden_TD in zip(self._passages, hidden_BTD, strict=True)
        ]


class ProbeAttention(CachedAttention):
    """Attention of one passage that keeps its keys and values, and may begin far from the start.

    The `past` positions before such a passage repeat two blocks: the first 16 positions of the
    second passage in the first half of the past, or wherever no window reaches, and then those of
    the first passage. Equal keys have equal scores, so that a key that occurs n times is one key
    with log n added to its score.
    """

    def __init__(
        self, config: Any, rotary: Any, past: int, halves: bool, earlier: "list[_Run]"
    ) -> None:
        super().__init__(config, rotary)
        self._length, self._halves, self._earlier = past, halves, earlier[:2]

    def self_attention(self, layer: int, qkv_BTE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        config, past = self._config, self._length
        q_BNTH, new = split_qkv(qkv_BTE, config, tables_of(self._rotary, config, layer), past)
        if self._halves:
            new = KeyValue(*(side.half().float() for side in new))
        self._layers[layer] = new
        num_new, window = q_BNTH.shape[2], config.window_of(layer)
        mask = causal_mask(num_new, num_new, window)
        if past:
            blocks = [run.attention.key_value(layer) for run in self._earlier]
            sides = [[side[:, :, :PAST_BLOCK] for side in block] for block in reversed(blocks)]
            new = KeyValue(*(torch.cat(each, dim=2) for each in zip(*sides, new, strict=True)))
            counts = past_counts(past, num_new, config.window, window)
            mask = torch.cat((torch.from_numpy(counts).log().float(), mask), dim=1)
        k_BNSH, v_BNSH = (repeat_groups(side, config.num_heads) for side in new)
        cap = config.attention_soft_cap
        weights = attention_weights(q_BNTH, k_BNSH, mask, config.scale, cap, sinks_N)
        return merge_heads(weights @ v_BNSH)

    def short_conv(
        self, layer: int, x_BTD: Tensor, kernel_DL: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        past, num_new = self._length, x_BTD.shape[1]
        x_BTD = x_BTD.half().float() if self._halves else x_BTD
        self._layers[layer] = as_state(x_BTD)
        if past:
            last = self._earlier[int(past_split(past, self._config.window) == past)]
            before = KeyValue(
                *(side[:, :, :PAST_BLOCK] for side in last.attention.key_value(layer))
            )
            x_BTD = torch.cat((from_state(before), x_BTD), dim=1)
        return causal_conv(x_BTD, num_new, kernel_DL, bias_D)


def past_split(past: int, window: int) -> int:
    """The number of positions of a past that repeat the second passage's block."""
    start = max(past - window, 0) if window else past // 2
    return -(-start // PAST_BLOCK) * PAST_BLOCK


def past_counts(past: int, num_new: int, split_window: int, window: int) -> Array:
    """How often each new token sees each of the 32 positions that a past repeats."""
    places = np.arange(past)
    kind = places % PAST_BLOCK + PAST_BLOCK * (places >= past_split(past, split_window))
    counts = np.zeros((num_new, 2 * PAST_BLOCK))
    for token in range(num_new):
        first = max(0, past + token - window + 1) if window else 0
        counts[token] = np.bincount(kind[first:], minlength=2 * PAST_BLOCK)
    return counts


def _batches(passages: Sequence[Passage]) -> list[list[Passage]]:
    """Neighbours of one length, of so many tokens together."""
    batches: list[list[Passage]] = []
    for passage in passages:
        length = len(passage.ids)
        fits = batches and len(batches[-1][0].ids) == length
        if not fits or (len(batches[-1]) + 1) * length > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(passage)
    return batches


def _batch_of_one(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)])

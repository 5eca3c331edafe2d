"""The reference: what PyTorch computes with the same weights, one layer in memory at a time.

Knows: the network in float32. Does not know: ONNX, tolerances.

A causal Transformer's layers are read one after another, and all passages pass through a layer
before the next one is read. Other networks are small, and are read whole.

With a quantization the reference rounds as the operators do: a matrix's inputs to 8 or 16 bits, the
KV cache to float16. What remains is the order of sums, so that small faults of a graph are seen.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quill.export.quantize.quantization import Quantization, dequantized
from quill.export.verify.held_out import MaskedText, Passage
from quill.export.verify.probe_attention import ProbeAttention
from quill.export.verify.projection import Array, Projection, rounded
from quill.export.verify.runner import EncoderOutput
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.attention import CrossKeyValue
from quill.model.network.layers import EncoderLayer
from quill.model.network.networks import make_network
from quill.model.network.transformer import Transformer

# T tokens · D model size · U distinct tokens

Tick = Callable[[], None]
BitsOf = Callable[[str], int | None]  # of a matrix, by name; None: its inputs aren't rounded

BATCH_TOKENS = 1024  # that pass through a layer together


@dataclass(frozen=True)
class ReferenceOutput:
    """PyTorch's hidden states after each token of a passage, and its KV cache."""

    passage: Passage
    hidden_TD: Array
    caches: list[Array] = field(default_factory=list)  # key 0, value 0, … (kv_heads, length, size)
    cross_caches: list[Array] = field(default_factory=list)  # of the source; empty for causal


def _round_inputs(name: str, module: nn.Module, input_bits: BitsOf) -> list[RemovableHandle]:
    """Makes the linear layers of a module round their inputs."""
    hooks = []
    for child_name, child in module.named_modules():
        bits = input_bits(f"{name}.{child_name}.weight".removeprefix("."))
        if isinstance(child, nn.Linear) and bits is not None:
            hooks.append(
                child.register_forward_pre_hook(
                    lambda _, inputs, bits=bits: (rounded(inputs[0], bits),)
                )
            )
    return hooks


def _of_quantization(quantization: Quantization | None) -> BitsOf:
    """How finely the inputs of each matrix are rounded."""
    weights = {} if quantization is None else quantization.weights
    found: dict[str, int | None] = {}  # reading a weight takes time

    def find(name: str) -> int | None:
        if name not in found:
            found[name] = weights[name].input_bits if name in weights else None
        return found[name]

    return find


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
        name = self._projection_name()
        self.project = Projection(checkpoint, self._model, name, self._input_bits(name))

    def rounding_as(self, quantization: Quantization) -> "PyTorchReference":
        """The reference of a quantization, which shares the weights if they are the same."""
        if not (self._streams and quantization.is_source):
            return PyTorchReference(self._checkpoint, quantization)
        other = copy.copy(self)
        other._input_bits, other._halves = _of_quantization(quantization), True
        other.project = self.project.rounding(other._input_bits(self._projection_name()))
        return other

    def _projection_name(self) -> str:
        return "embedding.weight" if self._model.projection is None else "projection.weight"

    def num_ticks(self, num_passages: int) -> int:
        """Of passages in one job."""
        return self._model.config.num_layers if self._streams else num_passages

    def outputs(
        self, passages: Sequence[Passage], *, num_cached: int = 0, tick: Tick = lambda: None
    ) -> list[ReferenceOutput]:
        """Of all passages; of the first `num_cached` with their KV cache. Passages that begin far
        from the start continue the first blocks of the first two."""
        return run_jobs([Job(self, passages, num_cached)], tick)[0]

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


class Job(NamedTuple):
    """Passages for a reference. Of the first `num_cached` the KV cache is returned, too."""

    reference: PyTorchReference
    passages: Sequence[Passage]
    num_cached: int = 0


def run_jobs(jobs: Sequence[Job], tick: Tick = lambda: None) -> list[list[ReferenceOutput]]:
    """The outputs of each job. References that share their weights read each layer once."""
    first, *others = (job.reference for job in jobs)
    if first._streams and all(each._model is first._model for each in others):
        return _by_layers(jobs, tick)
    if others:
        return [outputs for job in jobs for outputs in run_jobs([job], tick)]
    found = []
    for passage in jobs[0].passages:
        found.append(first._output(passage))
        tick()
    return [found]


@torch.no_grad()
def _by_layers(jobs: Sequence[Job], tick: Tick) -> list[list[ReferenceOutput]]:
    first, model = jobs[0].reference, jobs[0].reference._model
    assert isinstance(model, Transformer)
    ids_U = first._load_embedding([passage for job in jobs for passage in job.passages])
    runs = [_runs(model, ids_U, job) for job in jobs]
    for index in range(model.config.num_layers):
        layer = first._layer(index)
        for job, some in zip(jobs, runs, strict=True):
            hooks = _round_inputs(f"decoder.{index}", layer, job.reference._input_bits)
            for run in some:
                run.x_BTD = layer(run.x_BTD, index, run.attention)
            for hook in hooks:
                hook.remove()
        tick()
    return [[output for run in some for output in run.outputs(model)] for some in runs]


def _runs(model: Transformer, ids_U: Tensor, job: Job) -> "list[_Run]":
    earlier: list[ProbeAttention] = []
    for passage in job.passages[: job.num_cached]:
        halves = job.reference._halves
        earlier.append(ProbeAttention(model.config, model.rotary, passage.past, halves, earlier))
    cached = zip(job.passages, earlier, strict=False)
    runs = [_Run(model, ids_U, [passage], attention) for passage, attention in cached]
    others = _batches(job.passages[job.num_cached :])
    return [*runs, *(_Run(model, ids_U, some, model.uncached()) for some in others)]


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

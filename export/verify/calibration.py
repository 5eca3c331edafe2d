"""Runs PyTorch over calibration text: how much each matrix matters, and what a mixture loses.

Knows: a causal Transformer's layers, forwards and backwards, one in memory at a time.
Does not know: which kinds there are (export/quantize/mixture.py), graphs.

At every position a token is sampled from the model's own distribution. The squared gradients of its
log-likelihood are the Fisher information: how fast KL divergence grows with an error.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from quill.export.quantize.mixture import Statistics
from quill.export.quantize.quantization import EMBEDDING, Quantization, is_quantized
from quill.export.quantize.quantizers import span_of
from quill.export.verify.held_out import Passage
from quill.export.verify.projection import Array
from quill.export.verify.pytorch_reference import (
    BATCH_TOKENS,
    PyTorchReference,
    ReferenceOutput,
    Tick,
)
from quill.export.verify.token_scores import kl_divergence
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.tensors import Lazy, LazyTensor, TensorFile, lazy
from quill.model.network.transformer import Transformer

# B passages · T tokens of each · L tokens of all · D model size · V vocabulary · U distinct tokens
# N outputs · I inputs · K spans of inputs · C inputs of a span

NUM_SCORED = 128  # positions whose logits are in memory
SEED = 20221031  # the day "GPTQ" appeared
INPUT_BITS = 8  # of what weights of 4 to 6 bits are multiplied with


class _Sums:
    """The statistics of one matrix, token by token."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._outputs_N: Tensor | float = 0.0
        self._moments_KCC: Tensor | float = 0.0
        self._total = 0.0

    def add(self, x_LI: Tensor, squares_LN: Tensor) -> None:
        """Inputs, and the squared gradients of outputs."""
        x_KLC = x_LI.unflatten(1, (-1, span_of(x_LI.shape[1]))).transpose(0, 1)  # type: ignore[no-untyped-call]
        weights_L1 = squares_LN.sum(dim=1, keepdim=True)
        self._moments_KCC += (x_KLC * weights_L1).transpose(1, 2) @ x_KLC
        self._outputs_N += squares_LN.sum(dim=0)
        self._total += float(weights_L1.sum())
        self.num_tokens += len(x_LI)

    def statistics(self) -> Statistics:
        assert isinstance(self._moments_KCC, Tensor)
        assert isinstance(self._outputs_N, Tensor)
        outputs_N = self._outputs_N / self.num_tokens
        return Statistics(outputs_N, self._moments_KCC / max(self._total, 1e-30))


class Calibration(PyTorchReference):
    """The network with the source's weights, forwards and backwards."""

    def __init__(self, checkpoint: Checkpoint, file: TensorFile) -> None:
        super().__init__(checkpoint)
        self._file = file
        self._found: dict[str, tuple[LazyTensor, LazyTensor]] = {}
        self._generator = torch.Generator().manual_seed(SEED)

    def num_calibration_ticks(self) -> int:
        return 2 * self._model.config.num_layers + 1

    def statistics(self, passages: Sequence[Passage], tick: Tick) -> Mapping[str, Statistics]:
        """Of every matrix; in the file until they are read."""
        model = self._model
        assert isinstance(model, Transformer)
        ids_U = self._load_embedding(passages)
        ids_BT = torch.tensor([list(passage.ids) for passage in passages])
        size = max(1, BATCH_TOKENS // ids_BT.shape[1])
        runs = torch.split(torch.searchsorted(ids_U, ids_BT), size)
        inputs = self._forwards(model, runs, tick)
        gradients = self._last(model, inputs[-1])
        tick()
        for index in reversed(range(model.config.num_layers)):
            gradients = self._backwards(model, index, inputs.pop(index), gradients)
            tick()
        self._embedding(model, ids_U, runs, gradients)
        return Lazy({name: partial(_read, *entries) for name, entries in self._found.items()})

    @torch.no_grad()
    def _forwards(
        self, model: Transformer, runs: Sequence[Tensor], tick: Tick
    ) -> list[list[Tensor]]:
        """The inputs of each layer, and the last layer's outputs. In bfloat16 they are small."""
        inputs = [[model.embed(ids_BT, model.uncached()) for ids_BT in runs]]
        for index in range(model.config.num_layers):
            layer = self._layer(index)
            inputs.append([layer(x_BTD, index, model.uncached()) for x_BTD in inputs[-1]])
            inputs[-2] = [x_BTD.bfloat16() for x_BTD in inputs[-2]]
            tick()
        return inputs

    def _last(self, model: Transformer, outputs: Sequence[Tensor]) -> list[Tensor]:
        """From the last layer's outputs to the likelihood of sampled tokens, and back."""
        sums, gradients = _Sums(), []
        for x_BTD in outputs:
            x_BTD = x_BTD.detach().requires_grad_()
            hidden_BTD = model.decoder_norm(x_BTD)
            parts = torch.split(hidden_BTD.detach().flatten(0, 1), NUM_SCORED)
            gradient_LD = torch.cat([self._likelihood(model, sums, part) for part in parts])
            torch.autograd.backward(hidden_BTD, gradient_LD.view_as(hidden_BTD))
            assert x_BTD.grad is not None
            gradients.append(x_BTD.grad)
        self._keep("projection.weight" if model.projection is not None else EMBEDDING, sums)
        return gradients

    def _likelihood(self, model: Transformer, sums: _Sums, hidden_LD: Tensor) -> Tensor:
        """The gradient of hidden states."""
        logits_LV = torch.from_numpy(self.project(hidden_LD.numpy()))
        shares_LV = logits_LV.softmax(dim=-1)
        sums.add(hidden_LD, shares_LV * (1 - shares_LV))
        tokens_L1 = torch.multinomial(shares_LV, 1, generator=self._generator)
        gradient_LV = shares_LV.neg_().scatter_add_(
            1, tokens_L1, torch.ones_like(tokens_L1, dtype=torch.float32)
        )
        if cap := model.config.logit_soft_cap:
            gradient_LV *= 1 - (logits_LV / cap).square()
        return self.project.backward(gradient_LV)

    def _backwards(
        self,
        model: Transformer,
        index: int,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        """Through one layer. Adds up the statistics of its matrices."""
        layer, sums = self._layer(index), dict[str, _Sums]()
        for name, child in layer.named_modules():
            weight = f"decoder.{index}.{name}.weight"
            if isinstance(child, nn.Linear) and is_quantized(weight, 2):
                sums[weight] = _Sums()
                child.register_forward_hook(partial(_watch, sums[weight]))
        found = []
        for x_BTD, gradient_BTD in zip(inputs, gradients, strict=True):
            x_BTD = x_BTD.float().requires_grad_()
            torch.autograd.backward(layer(x_BTD, index, model.uncached()), gradient_BTD)
            assert x_BTD.grad is not None
            found.append(x_BTD.grad)
        for weight, of_one in sums.items():
            if of_one.num_tokens:  # experts' matrices are stacked, and multiplied with by others
                self._keep(weight, of_one)
        return found

    def _embedding(
        self,
        model: Transformer,
        ids_U: Tensor,
        runs: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        """Embeddings as inputs: an error of a token's is the same wherever the token is."""
        vectors_UD = model.embedding.weight.requires_grad_()
        for ids_BT, gradient_BTD in zip(runs, gradients, strict=True):
            torch.autograd.backward(model.embed(ids_BT, model.uncached()), gradient_BTD)
        assert vectors_UD.grad is not None
        num_tokens = sum(ids_BT.numel() for ids_BT in runs)
        squares_D = vectors_UD.grad.square().sum(dim=0) / num_tokens
        moments_KCC = torch.diag_embed(squares_D.view(-1, span_of(len(squares_D))))
        outputs_V = torch.zeros(model.config.vocab_size)
        outputs_V[ids_U] = (
            torch.cat(list(runs)).flatten().bincount(minlength=len(ids_U)) / num_tokens
        )
        if EMBEDDING in self._found:  # tied: tokens are about as frequent as they are likely
            outputs_V, likely_KCC = _read(*self._found[EMBEDDING])
            moments_KCC = likely_KCC + moments_KCC / outputs_V.sum().clamp_min(1e-30)
        self._write(EMBEDDING, Statistics(outputs_V, moments_KCC))

    def _keep(self, name: str, sums: _Sums) -> None:
        self._write(name, sums.statistics())

    def _write(self, name: str, statistics: Statistics) -> None:
        outputs, moments = map(self._file.append, statistics)
        self._found[name] = outputs, moments


def _read(outputs: LazyTensor, moments: LazyTensor) -> Statistics:
    return Statistics(outputs.read(), moments.read())


def _watch(sums: _Sums, _: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
    """A forward hook that adds to the sums when the gradient arrives."""
    x_LI = inputs[0].detach().flatten(0, -2)
    outputs.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: sums.add(x_LI, gradient.flatten(0, -2).square())
    )


class LossMeter:
    """Measures mixtures on text that no statistics come from."""

    def __init__(self, checkpoint: Checkpoint, passages: Sequence[Passage]) -> None:
        self._checkpoint = checkpoint
        self._passages = passages
        self._source = PyTorchReference(checkpoint)
        self._outputs = self._source.outputs(passages)

    def floor(self) -> float:
        """The KL divergence that rounded inputs cause, with the source's weights."""
        weights = lazy(self._checkpoint.weights)

        def input_bits(name: str) -> int | None:
            is_matrix = name in weights and is_quantized(name, len(weights.shape(name)))
            return INPUT_BITS if is_matrix else None

        return self._divergence(PyTorchReference(self._checkpoint, input_bits=input_bits))

    def loss(self, quantization: Quantization) -> float:
        """The mean KL divergence with these weights and rounded inputs."""
        return self._divergence(PyTorchReference(self._checkpoint, quantization))

    def _divergence(self, reference: PyTorchReference) -> float:
        found = reference.outputs(self._passages)
        parts = [
            kl_divergence(_logits(reference, ours, start), _logits(self._source, theirs, start))
            for ours, theirs in zip(found, self._outputs, strict=True)
            for start in range(0, len(ours.hidden_TD), NUM_SCORED)
        ]
        return float(np.concatenate(parts).mean())


def _logits(reference: PyTorchReference, output: ReferenceOutput, start: int) -> Array:
    return reference.project(output.hidden_TD[start : start + NUM_SCORED])

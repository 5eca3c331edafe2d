"""The training loss: cross-entropy of the next token, or of masked tokens, over a micro-batch.

Knows: the network's outputs and targets. Does not know: optimizers, data, devices.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from quill.model.data.batches import IGNORED, Batch
from quill.model.network.attention import CrossKeyValue
from quill.model.network.network import Network
from quill.model.network.transformer import Transformer


class Objective(nn.Module):
    """Wraps the network so that one call computes the loss, as DDP needs.

    The sum, not the mean: the caller divides by the targets of the whole batch, so that every
    target has the same weight.
    """

    def __init__(self, model: Network, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self._label_smoothing = label_smoothing

    def forward(self, batch: Batch) -> Tensor:
        predicted = predict(self.model, batch)
        return F.cross_entropy(
            predicted.logits_NV,
            predicted.targets_N,
            ignore_index=IGNORED,
            label_smoothing=self._label_smoothing,
            reduction="sum",
        )


class Predicted(NamedTuple):
    """A network's logits, and the targets."""

    logits_NV: Tensor
    targets_N: Tensor


def predict(model: Network, batch: Batch) -> Predicted:
    """The logits at all of a batch's positions; for an encoder only at those with a target."""
    targets_N = batch.targets_BT.flatten()
    if isinstance(model, Transformer) and model.config.family == "encoder":
        counts_N = targets_N != IGNORED
        hidden_ND = model.hidden_states(batch.inputs_BT).flatten(0, 1)[counts_N]
        return Predicted(model.project(hidden_ND), targets_N[counts_N])
    logits_BTV = model(batch.inputs_BT, encode_source(model, batch))
    return Predicted(logits_BTV.flatten(0, 1), targets_N)


def encode_source(model: Network, batch: Batch) -> CrossKeyValue | None:
    """What the decoder looks at in a seq2seq batch; nothing in a causal one."""
    if batch.source_BS is None or batch.source_mask_BS is None:
        return None
    return model.encode(batch.source_BS, batch.source_mask_BS)

"""What training makes smaller: the cross-entropy of the next token, summed over a piece.

Knows: the network's outputs and targets. Does not know: optimisers, data, devices.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from quill.model.data.batches import IGNORED, Batch
from quill.model.network.attention import CrossKeyValue
from quill.model.network.network import Network


class Objective(nn.Module):
    """Wraps the network so that one call gives a loss: what DDP wants to see.

    The sum, not the mean: the caller divides by the targets of the whole batch, so that pieces
    of different sizes weigh what they should.
    """

    def __init__(self, model: Network, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self._label_smoothing = label_smoothing

    def forward(self, batch: Batch) -> Tensor:
        logits_BTV = self.model(batch.inputs_BT, encode_source(self.model, batch))
        return F.cross_entropy(
            logits_BTV.flatten(0, 1),
            batch.targets_BT.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self._label_smoothing,
            reduction="sum",
        )


def encode_source(model: Network, batch: Batch) -> CrossKeyValue | None:
    """What the decoder looks at in a seq2seq batch; nothing in a causal one."""
    if batch.source_BS is None or batch.source_mask_BS is None:
        return None
    return model.encode(batch.source_BS, batch.source_mask_BS)

"""The interface of a network, for training, decoding, evaluation and export.

Knows: the methods. Does not know: the implementations (model/network/transformer.py and
model/network/recurrent.py).
"""

from abc import abstractmethod
from typing import Any, Protocol

from torch import Tensor, nn

from quill.model.network.attention import CrossKeyValue, KeyValue
from quill.model.network.config import ModelConfig

# B batch · T new tokens · S source tokens · D model size · V vocabulary


class DecoderCache(Protocol):
    """The KV cache, or a recurrent network's states, of the tokens so far."""

    def key_value(self, layer: int) -> KeyValue:
        """One layer's entries of all tokens, the newest included."""

    def reorder(self, order_B: Tensor) -> None:
        """Reorders the batch: beam search does so when beams change places."""


class Network(nn.Module):
    """Token ids in, logits out. `hidden` and `project` are separate so that a caller can compute
    the logits of one position only."""

    config: ModelConfig
    embedding: nn.Embedding
    projection: nn.Linear | None
    output_bias: nn.Parameter | None

    @abstractmethod
    def compute_tables(self) -> None:
        """Fills the tables that aren't learned; also after a model was built on the meta device."""

    @abstractmethod
    def encode(self, source_BS: Tensor, mask_BS: Tensor) -> CrossKeyValue:
        """Encodes the source once: keys and values for each decoder layer."""

    @abstractmethod
    def hidden(self, ids_BT: Tensor, attn_impl: Any) -> Tensor:
        """The decoder's last hidden state at every new token. `attn_impl`: `uncached` or `cached`,
        or an implementation of export's."""

    @property
    @abstractmethod
    def output_weight_VD(self) -> Tensor: ...

    @abstractmethod
    def project(self, x_BTD: Tensor) -> Tensor:
        """Hidden states become logits over the vocabulary."""

    @abstractmethod
    def uncached(self, cross: CrossKeyValue | None = None) -> object:
        """The implementation for whole sequences."""

    @abstractmethod
    def cached(self, cross: CrossKeyValue | None = None) -> DecoderCache:
        """The implementation with a cache, for new tokens."""

    def forward(self, ids_BT: Tensor, cross: CrossKeyValue | None = None) -> Tensor:
        """The logits at every position, with no cache."""
        return self.project(self.hidden(ids_BT, self.uncached(cross)))

    def num_parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

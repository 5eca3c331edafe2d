"""What every network offers to those who train, decode, evaluate and export it.

Knows: the questions. Does not know: the answers (model/network/transformer.py and
model/network/recurrent.py have them).
"""

from abc import abstractmethod
from typing import Any, Protocol

from torch import Tensor, nn

from quill.model.network.attention import CrossKeyValue, KeyValue
from quill.model.network.config import ModelConfig

# B rows · T new tokens · S source tokens · D model size · V vocabulary


class Past(Protocol):
    """What a network keeps of the tokens that it has read."""

    def key_value(self, layer: int) -> KeyValue:
        """What one layer keeps of each token, the newest included."""

    def select_rows(self, rows_B: Tensor) -> None:
        """Keeps or copies rows: what beam search does when hypotheses change places."""


class Network(nn.Module):
    """Token ids in, logits out. `hidden` and `project` are apart so that a caller who needs one
    position's logits doesn't pay for all."""

    config: ModelConfig
    embedding: nn.Embedding
    projection: nn.Linear | None
    output_bias: nn.Parameter | None

    @abstractmethod
    def compute_tables(self) -> None:
        """Fills in what isn't learnt; again after a model was built without memory for it."""

    @abstractmethod
    def encode(self, source_BS: Tensor, mask_BS: Tensor) -> CrossKeyValue:
        """Reads the source once and parks, for each decoder layer, what it will look at."""

    @abstractmethod
    def hidden(self, ids_BT: Tensor, attending: Any) -> Tensor:
        """The decoder's last hidden state at every new token. `attending`: `uncached` or `cached`,
        or what export puts in their place."""

    @property
    @abstractmethod
    def output_weight_VD(self) -> Tensor: ...

    @abstractmethod
    def project(self, x_BTD: Tensor) -> Tensor:
        """Hidden states become logits over the vocabulary."""

    @abstractmethod
    def uncached(self, cross: CrossKeyValue | None = None) -> object:
        """For whole sequences at once."""

    @abstractmethod
    def cached(self, cross: CrossKeyValue | None = None) -> Past:
        """For new tokens after those that were read before."""

    def forward(self, ids_BT: Tensor, cross: CrossKeyValue | None = None) -> Tensor:
        """The logits at every position, with no cache."""
        return self.project(self.hidden(ids_BT, self.uncached(cross)))

    def num_parameters(self) -> int:
        """How many numbers training changes; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

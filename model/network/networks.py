"""Makes the network of a config.

Knows: which kinds there are. Does not know: what they are made of.
"""

from quill.model.network.config import ModelConfig
from quill.model.network.network import Network
from quill.model.network.recurrent import Recurrent
from quill.model.network.transformer import Transformer


def make_network(config: ModelConfig) -> Network:
    """The network with initial weights."""
    return Transformer(config) if config.recurrence is None else Recurrent(config)

"""Runs an encoder's graph the plain way: texts packed one after another.

Knows: the graph's contract. Does not know: PyTorch, what is compared.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Graphs, Sizes
from quill.export.verify.runner import Array, open_session

# T tokens of all texts · D model size · L logits · V vocabulary


class Read(NamedTuple):
    """What the graph made of one text."""

    hidden_TD: Array
    logits_LV: Array  # at the places that were asked for


class EncoderRunner:
    """Reads texts, any number in one run."""

    def __init__(self, directory: Path, graphs: Graphs, sizes: Sizes) -> None:
        assert graphs.encoder is not None
        self._session = open_session(directory / graphs.encoder)
        self._has_segments = sizes.num_segments > 0

    def read(
        self, texts: Sequence[Sequence[int]], places: Sequence[Sequence[int]] | None = None
    ) -> list[Read]:
        """`places`: which tokens of each text want logits; none if nothing is said."""
        places = [()] * len(texts) if places is None else places
        starts = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        offsets = zip(starts[:-1], places, strict=True)
        wanted = [start + np.array(each, np.int64) for start, each in offsets]
        inputs: dict[str, Array] = {
            graph_contract.INPUT_IDS: np.concatenate([np.array(ids, np.int64) for ids in texts]),
            graph_contract.POSITIONS: np.concatenate([np.arange(len(ids)) for ids in texts]),
            graph_contract.QUERY_STARTS: starts,
            graph_contract.LOGIT_INDICES: np.concatenate(wanted),
        }
        if self._has_segments:
            inputs[graph_contract.SEGMENTS] = np.zeros(starts[-1], np.int64)
        outputs = [graph_contract.HIDDEN, graph_contract.LOGITS]
        hidden_TD, logits_LV = self._session.run(outputs, inputs)
        ends = np.cumsum([len(each) for each in places])
        parts = zip(np.split(hidden_TD, starts[1:-1]), np.split(logits_LV, ends[:-1]), strict=True)
        return [Read(*part) for part in parts]

"""Quill's tensors become those of another format: model/importers/tensor_layout.py run backwards.

Knows: how the parts of a tensor were joined. Does not know: files, names, number formats.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quill.export.errors import UnsupportedModelError
from quill.model.checkpoint.quantized_weight import QuantizedWeight, Rows
from quill.model.importers.tensor_layout import Layout, Part
from quill.model.progress import track


def num_rows(part: Part) -> int:
    """How many outputs of one of our tensors a part has."""
    if part.order is not None:
        return len(part.order)
    if part.place is not None:
        return part.shape[1]
    num_outputs = part.shape[-1 if part.transposed else int(part.stacked)]
    return part.shape[0] * num_outputs if part.stacked else num_outputs


def separate_all(
    layout: Layout, read: Callable[[str], Iterator[tuple[str, Tensor]]], title: str
) -> Iterator[tuple[str, Tensor]]:
    """All of their tensors, of one of ours at a time. `read`: those of one of ours. Phi has one
    norm where Quill has two."""
    uses = Counter(name for parts in layout.values() for name in {part.name for part in parts})
    shared: dict[str, Tensor] = {}
    for ours in track(list(layout), title):
        for name, tensor in read(ours):
            if name not in shared:
                yield name, tensor
            elif not torch.equal(shared[name], tensor):
                raise UnsupportedModelError(
                    "the network has two tensors with different numbers where the format has one, "
                    f"{name}"
                )
            if uses[name] > 1:
                shared[name] = tensor


def separated(parts: Sequence[Part], whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Their tensors, by name, that one of ours was joined of."""
    yield from restored(parts, torch.split(whole, [num_rows(part) for part in parts]))


def restored(parts: Sequence[Part], rows: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same of the rows of each part, which may be raw bytes."""
    pieces: dict[str, list[Tensor]] = {}
    for part, rows_N in zip(parts, rows, strict=True):
        pieces.setdefault(part.name, []).append(_restored(part, rows_N))
    for part in {part.name: part for part in parts}.values():
        found = pieces[part.name]
        yield part.name, found[0] if part.place is None else torch.stack(found)


def _restored(part: Part, rows_N: Tensor) -> Tensor:
    if (part.plus, part.times) != (0.0, 1.0):
        rows_N = rows_N.float() / part.times - part.plus
    if part.order is not None:
        number = len(rows_N) if part.stacked else part.shape[0]
        ordered_N = rows_N.new_zeros((number, *rows_N.shape[1:]))
        ordered_N[torch.from_numpy(part.order)] = rows_N
        rows_N = ordered_N
    if part.stacked:
        rows_N = torch.unflatten(rows_N, 0, (part.shape[0], -1))
    return rows_N.mT.contiguous() if part.transposed else rows_N


def rows_of_parts(parts: Sequence[Part], weight: QuantizedWeight) -> list[Rows] | None:
    """The rows of each part; None where a tensor of theirs would have rows of several kinds."""
    sizes, found = [num_rows(part) for part in parts], list[Rows]()
    waiting = weight.rows()[::-1]
    for size in sizes:
        rows = waiting.pop()
        if len(rows.raw_Nb) < size:
            return None
        if len(rows.raw_Nb) > size:
            waiting.append(Rows(rows.kind, rows.raw_Nb[size:]))
        found.append(Rows(rows.kind, rows.raw_Nb[:size]))
    kinds = {(part.name, rows.kind) for part, rows in zip(parts, found, strict=True)}
    return found if len(kinds) == len({part.name for part in parts}) else None

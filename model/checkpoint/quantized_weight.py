"""Quantized matrices, kept exactly as their source has them: in GGUF's blocks.

Knows: nine block formats of GGUF, what their bytes stand for. Does not know: files, graphs.

A matrix whose parts came from several tensors (queries, keys and values) can have rows of several
kinds. Its kind then counts them: "q4_k:1792,q6_k:256".
"""

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quill.model.errors import CheckpointError

# N outputs · I inputs · G = I / 32 (for q6_k I / 16) inputs that share a scale
# S blocks along the inputs · b bytes of a block · B integers of a block

BLOCK_SIZE = 32  # inputs of a block; K-kinds have 8 of them in one
SUPER_SIZE = 256
# Weights that are dequantized at a time: what one step of that writes is still in the processor's
# cache when the next one reads it. numpy and threads of our own aren't slowed down by a busy
# machine; torch's threads wait for one another after each step.
CHUNK_SIZE = 1 << 16
Kind = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4"]

Raw = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_FOUR, _TOP = np.uint8(4), np.uint8(128)
# Twice the numbers that the codes of MXFP4 stand for.
_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
MAX_EXPONENT = 252  # of MXFP4: the numbers of a larger one's block are beyond float32


class Blocks(NamedTuple):
    """The integers of a matrix, and the numbers beside them as the source has them.

    weight = scale * (q - middle) if there are no minima, and scale * q + minimum if there are.
    K-kinds: the scale is number 0 times integer 0, the minimum minus number 1 times integer 1.
    MXFP4: the integers are codes, and the scale, half a power of two, is the bits of a bfloat16.
    """

    q_NI: Raw  # from 0 to 2 ** bits - 1
    numbers_NSH: npt.NDArray[Any]  # a block's scale; then its minimum, if there are minima
    integers_NGH: npt.NDArray[Any] | None  # uint8, or int8 for q6_k


class Format(NamedTuple):
    """A block: where its float16 numbers are, and how its bytes become integers."""

    bits: int
    middle: int  # 0: there are minima
    size: int  # integers of a block
    num_bytes: int
    read: Callable[[Raw], tuple[Raw, slice, npt.NDArray[Any] | None]]
    codes: bool = False  # integers are MXFP4's codes, and scales its exponents

    @property
    def per_scale(self) -> int:
        return 16 if self.bits == 6 else BLOCK_SIZE


def _halves(bytes_NSb: Raw) -> Raw:
    """The low halves of bytes, then their high halves."""
    return np.concatenate((bytes_NSb & 15, bytes_NSb >> 4), axis=-1)


def _bit_by_bit(bytes_NSb: Raw) -> Raw:
    """The bits of the first byte, the lowest first, then of the next."""
    return np.unpackbits(bytes_NSb, axis=-1, bitorder="little")


def _four_bits(start: int) -> Callable[[Raw], tuple[Raw, slice, None]]:
    return lambda raw_NSb: (_halves(raw_NSb[..., start:]), slice(0, start), None)


def _five_bits(start: int) -> Callable[[Raw], tuple[Raw, slice, None]]:
    def read(raw_NSb: Raw) -> tuple[Raw, slice, None]:
        low_NSB = _halves(raw_NSb[..., start + 4 :])
        high_NSB = _bit_by_bit(raw_NSb[..., start : start + 4]) << _FOUR
        return low_NSB | high_NSB, slice(0, start), None

    return read


def _eight_bits(raw_NSb: Raw) -> tuple[Raw, slice, None]:
    return raw_NSb[..., 2:] ^ _TOP, slice(0, 2), None


def _chunked(raw_NSb: Raw, size: int, shifts: Iterable[int], mask: int) -> Raw:
    """Chunks of `size` bytes: all of their lowest bits, then all of the next ones, …"""
    chunks = raw_NSb.reshape(*raw_NSb.shape[:2], -1, size)
    parts = [chunks >> np.uint8(shift) & np.uint8(mask) for shift in shifts]
    return np.stack(parts, axis=3).reshape(*raw_NSb.shape[:2], -1)


def _scales_and_minima(raw_NSb: Raw) -> Raw:
    """Eight scales and minima of 6 bits in 12 bytes; (N, S * 8, 2)."""
    low_NS4, middle_NS4, high_NS4 = np.split(raw_NSb, 3, axis=-1)
    scale = (low_NS4 & 63, high_NS4 & 15 | low_NS4 >> 2 & 48)
    minimum = (middle_NS4 & 63, high_NS4 >> 4 | middle_NS4 >> 2 & 48)
    both = [np.concatenate(each, axis=-1) for each in (scale, minimum)]
    return np.stack(both, axis=-1).reshape(len(raw_NSb), -1, 2)


def _four_bits_k(raw_NSb: Raw) -> tuple[Raw, slice, Raw]:
    q_NSB = _chunked(raw_NSb[..., 16:], 32, (0, 4), 15)
    return q_NSB, slice(0, 4), _scales_and_minima(raw_NSb[..., 4:16])


def _five_bits_k(raw_NSb: Raw) -> tuple[Raw, slice, Raw]:
    high_NSB = _chunked(raw_NSb[..., 16:48], 32, range(8), 1)
    q_NSB = _chunked(raw_NSb[..., 48:], 32, (0, 4), 15) | high_NSB << _FOUR
    return q_NSB, slice(0, 4), _scales_and_minima(raw_NSb[..., 4:16])


def _six_bits_k(raw_NSb: Raw) -> tuple[Raw, slice, npt.NDArray[np.int8]]:
    low_NSB = _chunked(raw_NSb[..., :128], 64, (0, 4), 15)
    q_NSB = low_NSB | _chunked(raw_NSb[..., 128:192], 32, (0, 2, 4, 6), 3) << _FOUR
    scales_NG1 = raw_NSb[..., 192:208].reshape(len(raw_NSb), -1, 1).view(np.int8)
    return q_NSB, slice(208, 210), scales_NG1


FORMATS: dict[Kind, Format] = {
    "q4_0": Format(4, 8, BLOCK_SIZE, 18, _four_bits(2)),
    "q4_1": Format(4, 0, BLOCK_SIZE, 20, _four_bits(4)),
    "q5_0": Format(5, 16, BLOCK_SIZE, 22, _five_bits(2)),
    "q5_1": Format(5, 0, BLOCK_SIZE, 24, _five_bits(4)),
    "q8_0": Format(8, 128, BLOCK_SIZE, 34, _eight_bits),
    "q4_k": Format(4, 0, SUPER_SIZE, 144, _four_bits_k),
    "q5_k": Format(5, 0, SUPER_SIZE, 176, _five_bits_k),
    "q6_k": Format(6, 32, SUPER_SIZE, 210, _six_bits_k),
    "mxfp4": Format(4, 12, BLOCK_SIZE, 17, _four_bits(1), codes=True),
}


def _bfloats(exponents: Raw) -> npt.NDArray[np.uint16]:
    """2 ** (exponent - 128) as the bits of a bfloat16; the two smallest are subnormal."""
    wide = exponents.astype(np.uint16)
    return np.where(wide < 2, np.uint16(32) << wide, (wide - np.uint16(1)) << np.uint16(7))


@dataclass(frozen=True)
class Rows:
    """Neighbouring outputs of one kind."""

    kind: Kind
    raw_Nb: Raw  # a view of the weight's bytes

    @property
    def format(self) -> Format:
        return FORMATS[self.kind]

    def unpack(self) -> Blocks:
        raw_NSb = self.raw_Nb.reshape(len(self.raw_Nb), -1, self.format.num_bytes)
        q_NSB, of_numbers, integers_NGH = self.format.read(raw_NSb)
        bytes_NSb = np.ascontiguousarray(raw_NSb[..., of_numbers])
        numbers_NSH = _bfloats(bytes_NSb) if self.format.codes else bytes_NSb.view(np.float16)
        return Blocks(q_NSB.reshape(len(raw_NSb), -1), numbers_NSH, integers_NGH)

    def dequantize(self, w_NI: Floats) -> None:
        """Fills a matrix with what, to the last bit, the `gguf` package makes of these rows."""
        num_rows = max(1, CHUNK_SIZE // w_NI.shape[1])
        starts = range(0, len(w_NI), num_rows)

        def fill(start: int) -> None:
            end = start + num_rows
            Rows(self.kind, self.raw_Nb[start:end])._fill(w_NI[start:end])

        if len(starts) == 1:
            fill(0)
            return
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(fill, starts))

    def _fill(self, w_NI: Floats) -> None:
        q_NI, numbers_NSH, integers_NGH = self.unpack()
        per_scale, middle = self.format.per_scale, self.format.middle
        if self.format.codes:
            scales_NG = (numbers_NSH[..., 0].astype(np.uint32) << 16).view(np.float32)
            w_NI[...] = _CODES[q_NI]
            w_NI.reshape(len(w_NI), -1, per_scale)[...] *= scales_NG[..., None]
            return
        factors = [numbers_NSH[..., i].astype(np.float32) for i in range(numbers_NSH.shape[2])]
        if integers_NGH is not None:
            per_block = self.format.size // per_scale
            factors = [
                factor.repeat(per_block, axis=1) * integers_NGH[..., i].astype(np.float32)
                for i, factor in enumerate(factors)
            ]
        w_NI[...] = q_NI
        w_NGB = w_NI.reshape(len(w_NI), -1, per_scale)
        if middle:
            w_NGB -= middle
        w_NGB *= factors[0][..., None]
        if not middle and integers_NGH is None:
            w_NGB += factors[1][..., None]
        elif not middle:
            w_NGB -= factors[1][..., None]


class FinerRows(NamedTuple):
    """Some rows of a matrix, in a finer kind."""

    rows_M: Tensor  # their numbers, ascending
    weight: "QuantizedWeight"


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix in the blocks of its source: row after row, along the inputs."""

    kind: str  # a Kind, or several with the numbers of their rows: "q4_k:1792,q6_k:256"
    raw: Tensor  # uint8: (N, b), or (bytes,) if there are several kinds
    finer: FinerRows | None = None  # in the place of the same rows here

    def __post_init__(self) -> None:
        sizes = [FORMATS[kind].size for kind, _ in row_counts(self.kind)]
        if self.raw.dtype != torch.uint8 or self.shape[1] <= 0 or self.shape[1] % max(sizes):
            raise CheckpointError(
                f"a matrix of {self.raw.dtype} with the shape {tuple(self.raw.shape)} can't be "
                f"blocks of {self.kind}"
            )

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        counts = row_counts(self.kind)
        num_rows = len(self.raw) if len(counts) == 1 else sum(num for _, num in counts)
        per_width = sum(_row_bytes(kind, SUPER_SIZE) * num for kind, num in counts)
        num_bytes = self.raw.numel() if len(counts) > 1 else self.raw.shape[-1]
        num_inputs, rest = divmod(num_bytes * SUPER_SIZE, per_width)
        return num_rows, 0 if rest else num_inputs

    def rows(self) -> list[Rows]:
        """Its parts; most matrices have one."""
        raw, counts = self.raw.numpy(), row_counts(self.kind)
        if len(counts) == 1:
            return [Rows(counts[0][0], raw)]
        parts, start = [], 0
        for kind, num_rows in counts:
            end = start + num_rows * _row_bytes(kind, self.shape[1])
            parts.append(Rows(kind, raw[start:end].reshape(num_rows, -1)))
            start = end
        return parts

    def dequantize(self) -> Tensor:
        """The matrix in float32."""
        w_NI, start = np.empty(self.shape, np.float32), 0
        for rows in self.rows():
            end = start + len(rows.raw_Nb)
            rows.dequantize(w_NI[start:end])
            start = end
        if self.finer is not None:
            w_NI[self.finer.rows_M.numpy()] = self.finer.weight.dequantize().numpy()
        return torch.from_numpy(w_NI)

    def dequantize_rows(self, rows_U: Tensor) -> Tensor:
        """Some rows in float32. All rows are of one kind, but for finer ones."""
        found_UI = QuantizedWeight(self.kind, self.raw[rows_U]).dequantize()
        if self.finer is not None:
            rows_M, finer = self.finer
            places_U = torch.searchsorted(rows_M, rows_U).clamp(max=len(rows_M) - 1)
            is_finer_U = rows_M[places_U] == rows_U
            found_UI[is_finer_U] = finer.dequantize_rows(places_U[is_finer_U])
        return found_UI


def _row_bytes(kind: Kind, num_inputs: int) -> int:
    return num_inputs // FORMATS[kind].size * FORMATS[kind].num_bytes


def row_counts(kind: str) -> list[tuple[Kind, int]]:
    """The kinds of a weight's rows. The number of a single kind's rows is 1."""
    counts: list[tuple[Kind, int]] = []
    for part in kind.split(","):
        name, _, num = part.partition(":")
        found = [each for each in get_args(Kind) if each == name]
        if not found or bool(num) != ("," in kind) or (num and not num.isdecimal()):
            raise CheckpointError(f"there are quantized weights of the unknown kind {kind!r}")
        counts += [(found[0], int(num or 1))]
    if any(num == 0 for _, num in counts):
        raise CheckpointError(f"a kind of {kind!r} has no outputs")
    return counts


def stack_rows(parts: Iterable[Rows]) -> QuantizedWeight:
    """One matrix of all rows; neighbours of one kind become one part."""
    merged: list[tuple[Kind, list[Raw]]] = []
    for part in parts:
        if not merged or merged[-1][0] != part.kind:
            merged.append((part.kind, []))
        merged[-1][1].append(part.raw_Nb)
    if len(merged) == 1:
        kind, raws = merged[0]
        whole = raws[0] if len(raws) == 1 else np.concatenate(raws)
        # A copy only where torch can't have a view, as of a file that is mapped read-only.
        return QuantizedWeight(kind, torch.from_numpy(np.require(whole, None, ["C", "W"])))
    names = [f"{kind}:{sum(map(len, raws))}" for kind, raws in merged]
    flat = np.concatenate([raw.reshape(-1) for _, raws in merged for raw in raws])
    return QuantizedWeight(",".join(names), torch.from_numpy(flat))


def in_order(weight: QuantizedWeight, rows_N: Tensor) -> QuantizedWeight:
    """The same matrix with its outputs in another order. All rows are of one kind."""
    assert weight.raw.ndim == 2
    return QuantizedWeight(weight.kind, weight.raw[rows_N])


def pack(
    kind: Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"],
    q_NI: Tensor,
    scale_NG: Tensor,
    minimum_NG: Tensor | None = None,
) -> QuantizedWeight:
    """Blocks of integers from 0 to 2 ** bits - 1. Scales and minima are rounded to float16."""
    q_NGB = q_NI.numpy().astype(np.uint8).reshape(*scale_NG.shape, BLOCK_SIZE)
    numbers = [each for each in (scale_NG, minimum_NG) if each is not None]
    parts = [each.half().unsqueeze(-1).contiguous().numpy().view(np.uint8) for each in numbers]
    if FORMATS[kind].bits == 5:
        parts.append(np.packbits(q_NGB >> _FOUR, axis=-1, bitorder="little"))
        q_NGB &= 15
    parts.append(q_NGB ^ _TOP if kind == "q8_0" else q_NGB[..., :16] | q_NGB[..., 16:] << _FOUR)
    raw_Nb = np.concatenate(parts, axis=-1).reshape(len(q_NI), -1)
    return QuantizedWeight(kind, torch.from_numpy(raw_Nb))


def pack_k(
    kind: Literal["q4_k", "q5_k"], q_NI: Tensor, numbers_NS2: Tensor, integers_NG2: Tensor
) -> QuantizedWeight:
    """Blocks of 256 integers, two numbers of float16, and eight times two integers of 6 bits."""
    num_rows, num_blocks, _ = numbers_NS2.shape
    head_NSb = numbers_NS2.half().contiguous().numpy().view(np.uint8)
    both = integers_NG2.numpy().astype(np.uint8).reshape(num_rows, num_blocks, 2, 4, 2)
    (low_NS4, high_NS4), (low_min_NS4, high_min_NS4) = np.moveaxis(both, (4, 2), (0, 1))
    small = [
        low | high >> _FOUR << 6 for low, high in ((low_NS4, high_NS4), (low_min_NS4, high_min_NS4))
    ]
    parts = [head_NSb, *small, high_NS4 & 15 | (high_min_NS4 & 15) << _FOUR]
    q_NSB = q_NI.numpy().astype(np.uint8).reshape(num_rows, num_blocks, SUPER_SIZE)
    if kind == "q5_k":
        bits_NS8B = (q_NSB >> _FOUR).reshape(num_rows, num_blocks, 8, BLOCK_SIZE)
        parts.append(np.packbits(bits_NS8B, axis=2, bitorder="little")[:, :, 0])
        q_NSB &= 15
    halves = q_NSB.reshape(num_rows, num_blocks, -1, 2, BLOCK_SIZE)
    low_half, high_half = np.moveaxis(halves, 3, 0)
    parts.append((low_half | high_half << _FOUR).reshape(num_rows, num_blocks, -1))
    raw_Nb = np.concatenate(parts, axis=-1).reshape(num_rows, -1)
    return QuantizedWeight(kind, torch.from_numpy(raw_Nb))

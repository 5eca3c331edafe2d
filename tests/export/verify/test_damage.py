"""Damage between writing and verifying: weights that aren't the checkpoint's are refused."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from quill.export.errors import VerificationError
from quill.export.pipeline import ExportOptions, write_bundle
from quill.export.precisions import Precision
from quill.export.verify.verifier import Tick
from tests.export.tiny import make_checkpoint
from tests.tiny_networks import LLAMA

CONFIG = replace(LLAMA, context=512, vocab_size=2048)
MATRIX = "model.decoder.1.feed_forward.up.weight"
VOCABULARY = "records_CRB"  # the largest of them
Damage = Callable[[np.ndarray], None]  # of a tensor's bytes


def bytes_changed(num: int) -> Damage:
    def damage(data: np.ndarray) -> None:
        data[np.linspace(0, len(data) // 4, num, dtype=int)] ^= 0x11

    return damage


def one_weight_times(factor: float) -> Damage:
    def damage(data: np.ndarray) -> None:
        data.view(np.float32)[np.abs(data.view(np.float32)).argmax()] *= factor

    return damage


def all_weights_times(factor: float) -> Damage:
    def damage(data: np.ndarray) -> None:
        data.view(np.float32)[:] *= np.float32(factor)

    return damage


def cosines_zeroed_from(position: int) -> Damage:
    def damage(data: np.ndarray) -> None:
        data.view(np.float32).reshape(CONFIG.context, -1)[position:] = 0

    return damage


def change_weights(directory: Path, precision: str, tensor: str, damage: Damage) -> None:
    graph = onnx.load(directory / f"decoder.{precision}.onnx", load_external_data=False).graph
    places = [
        {entry.key: entry.value for entry in each.external_data}
        for each in graph.initializer
        if each.name.endswith(tensor) and each.external_data
    ]
    place = max(places, key=lambda each: int(each["length"]))
    path = directory / place["location"]
    data = np.fromfile(path, np.uint8)
    start, length = int(place["offset"]), int(place["length"])
    damage(data[start : start + length])
    data.tofile(path)


@pytest.mark.parametrize(
    ("precision", "tensor", "damage"),
    [
        ("fp32", MATRIX, one_weight_times(3)),
        ("fp32", MATRIX, all_weights_times(1.02)),
        ("fp32", "rotary_cos_PF", cosines_zeroed_from(400)),
        ("quill8", VOCABULARY, bytes_changed(64)),
        ("quill8", "rotary_cos_PF", cosines_zeroed_from(100)),
        ("quill8", "rotary_cos_PF", cosines_zeroed_from(256)),
        ("quill8", "rotary_cos_PF", cosines_zeroed_from(400)),
        ("quill4", VOCABULARY, bytes_changed(64)),
        ("quill4", "rotary_cos_PF", cosines_zeroed_from(301)),
    ],
)
def test_damaged_weights_are_refused(
    precision: Precision, tensor: str, damage: Damage, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def damaging(title: str, total: int | None = None) -> Iterator[Tick]:
        if title.endswith("verifying"):
            (directory,) = tmp_path.glob(".out.*.part")
            change_weights(directory, precision, tensor, damage)
        yield lambda: None

    options = ExportOptions(precisions=(precision,))
    with pytest.raises(VerificationError, match="doesn't compute what PyTorch computes"):
        write_bundle(tmp_path / "out", make_checkpoint(CONFIG), options, damaging)
    assert list(tmp_path.iterdir()) == []

"""One decision: which models can be exported in which precisions."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quill.export import exportability as module
from quill.export.errors import UnsupportedModelError
from quill.export.exportability import check_exportable, exportability
from quill.export.pipeline import ExportOptions, write_bundle
from quill.export.precisions import ALL_PRECISIONS, Precision
from quill.model.network.config import Experts, Latent, ModelConfig, ShortConv
from tests.export.tiny import make_checkpoint
from tests.tiny_networks import ENCODER, GPT, LLAMA, RECURRENT, SEQ2SEQ

EVERY = set(ALL_PRECISIONS)
CPU = {"fp32", "quill4", "quill8"}
EXPERTS = Experts(number=4, per_token=2, d_expert=32)
CONV = ShortConv(taps=3, layers=(1,))
LATENT = Latent(rank=32, rope_size=16, nope_size=16, value_size=16)


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("config", "possible", "reason"),
    [
        (LLAMA, EVERY, ""),
        (GPT, EVERY, ""),
        (SEQ2SEQ, CPU, "a translator has no fp16 graphs"),
        (ENCODER, CPU, "an encoder has no fp16 graphs"),
        (changed(LLAMA, experts=EXPERTS), CPU, "a model with experts has no fp16 graphs"),
        (
            changed(LLAMA, latent=LATENT, head_size=32, num_kv_heads=4),
            CPU,
            "a model with latent attention has no fp16 graphs",
        ),
        (changed(LLAMA, window=20), CPU, "a model with a window has no fp16 graphs"),
        (changed(LLAMA, attention_sinks=True), CPU, "a model with attention sinks has no fp16"),
        (changed(LLAMA, short_conv=CONV), CPU, "a model with short convolutions has no fp16"),
        (changed(LLAMA, d_ff=100), {"fp32", "fp16"}, "d_ff is 100; quantized weights need"),
        (changed(LLAMA, head_size=8), set(), "head size is 8; Quill's attention needs a multiple"),
        (changed(LLAMA, head_size=656), set(), "of 16 up to 640"),
        (changed(LLAMA, num_heads=256, num_kv_heads=1), set(), "256 heads share"),
        (changed(LLAMA, context=8), set(), "context is 8 tokens; at least 16"),
        (
            changed(LLAMA, experts=dataclasses.replace(EXPERTS, d_expert=24)),
            set(),
            "d_expert is 24; Quill's operators for experts",
        ),
        (
            changed(RECURRENT, d_model=48, head_size=48, d_ff=48),
            set(),
            "d_model is 48; a recurrent encoder",
        ),
    ],
)
def test_each_shape_has_its_precisions_and_the_others_a_reason(
    config: ModelConfig, possible: set[Precision], reason: str
) -> None:
    found = {name: exportability(config, name) for name in ALL_PRECISIONS}
    assert {name for name, problem in found.items() if problem is None} == possible
    for name in EVERY - possible:
        problem = found[name]
        assert problem is not None
        assert reason in problem.reason
        with pytest.raises(UnsupportedModelError):
            check_exportable(config, name)


def test_verification_needs_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "operators_problem", lambda: "not built")
    assert exportability(LLAMA, "fp32") is None
    problem = exportability(LLAMA, "fp32", verify=True)
    assert problem is not None
    assert problem.reason == "not built"


def test_a_bundle_of_an_impossible_precision_is_not_written(tmp_path: Path) -> None:
    options = ExportOptions(precisions=("fp16",), verify=False)
    with pytest.raises(UnsupportedModelError, match="a translator has no fp16 graphs"):
        write_bundle(tmp_path / "out", make_checkpoint(SEQ2SEQ), options)
    assert not list(tmp_path.iterdir())

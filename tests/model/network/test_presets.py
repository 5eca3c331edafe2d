"""Presets have the sizes that their names promise."""

import pytest
import torch

from quill.model.errors import ConfigError
from quill.model.network.networks import make_network
from quill.model.network.presets import PRESETS, preset


def num_parameters(name: str) -> int:
    with torch.device("meta"):
        return make_network(preset(name)).num_parameters()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer-base", 63_045_632),  # the paper's table: 65 million
        ("transformer-big", 214_171_648),  # 213 million
        ("small", 124_439_808),
        ("llama-smollm2-135m", 134_515_008),
    ],
)
def test_parameter_counts_are_exactly_these(name: str, expected: int) -> None:
    assert num_parameters(name) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds(name: str) -> None:
    assert num_parameters(name) > 0


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'huge'; there are tiny, moe-tiny, "):
        preset("huge")

"""A config is whole and consistent, or refused by name."""

import dataclasses
import json
import math
from typing import Any

import pytest

from quill.model.errors import ConfigError
from quill.model.network.config import ModelConfig, Recurrence, RotaryScaling, ShortConv
from quill.model.network.presets import PRESETS, preset

CAUSAL = preset("tiny")
SEQ2SEQ = preset("seq2seq-tiny")
RECURRENT = preset("gru-bahdanau-tiny")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "recurrent"}, "family is 'recurrent'; it must be one of causal, seq2seq"),
        ({"positions": "none"}, "positions is 'none'"),
        ({"norm": "batch"}, "norm is 'batch'"),
        ({"norm_placement": "both"}, "norm_placement is 'both'"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be from 1 to 16777216"),
        ({"context": 0}, "context is 0"),
        ({"d_model": 0}, "d_model is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"head_size": -4}, "head_size is -4"),
        ({"d_ff": 0}, "d_ff is 0"),
        ({"d_ff": 2**53}, "d_ff is 9007199254740992; it must be from 1 to 16777216"),
        ({"context": 2**31}, "context is 2147483648; it must be from 1 to 4194304"),
        ({"num_layers": 2**53}, "num_layers is 9007199254740992; it must be from 1 to 1024"),
        ({"num_encoder_layers": -1}, "num_encoder_layers is -1; it must be from 0 to 1024"),
        ({"dropout": 1.0}, r"dropout is 1\.0"),
        ({"dropout": math.nan}, "dropout is nan"),
        ({"norm_eps": 0.0}, r"norm_eps is 0\.0"),
        ({"rotary_base": math.inf}, "rotary_base is inf"),
        ({"num_heads": 6, "num_kv_heads": 4}, "6 query heads .* 4 K/V heads"),
        ({"head_size": 33}, "rotary positions need an even head size, not 33"),
        ({"positions": "sinusoidal", "d_model": 33}, "even d_model, not 33"),
        (
            {"positions": "learned", "rotary_scaling": RotaryScaling(kind="linear", factor=2.0)},
            "rotary_scaling is set but positions are learned",
        ),
        ({"relative_buckets": 8}, "relative_buckets is 8 in a causal model"),
        ({"relative_buckets": 2}, "relative_buckets is 2; it must be from 4"),
        ({"relative_buckets": 32, "relative_distance": 31}, "relative_distance is 31"),
        ({"num_encoder_layers": 2}, "a causal model with 2 encoder layers"),
        ({"num_segments": 2}, "a causal model with num_segments 2 and masked_head False"),
        ({"family": "encoder"}, "an? encoder model with 0 encoder layers"),
        ({"family": "encoder", "num_encoder_layers": 2}, "an encoder with 4 decoder layers"),
    ],
)
def test_contradictions_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CAUSAL, **changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "ntk", "factor": 2.0}, "kind is 'ntk'; it must be one of linear, llama3, yarn"),
        ({"kind": "longrope", "factor": 2.0}, "a divisor for each frequency"),
        ({"kind": "yarn", "factor": 2.0, "attention_factor": -1.0}, "isn't positive"),
        ({"kind": "linear", "factor": 0.5}, r"factor is 0\.5"),
        ({"kind": "linear", "factor": math.nan}, "factor is nan"),
        ({"kind": "llama3", "factor": 2.0, "low_freq_factor": 9.0}, r"low_freq_factor 9\.0"),
        ({"kind": "llama3", "factor": 2.0, "original_context": 0}, "original_context is 0"),
    ],
)
def test_impossible_rotary_scaling_is_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RotaryScaling(**settings)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (SEQ2SEQ, {"num_encoder_layers": 0}, "a seq2seq model with 0 encoder layers"),
        (RECURRENT, {"family": "causal", "num_encoder_layers": 0}, "causal; .* must be seq2seq"),
        (RECURRENT, {"num_heads": 4}, "num_heads is 4; in a recurrent network it must be 1"),
        (RECURRENT, {"head_size": 64}, "head_size is 64; in a recurrent network it must be 256"),
        (RECURRENT, {"d_ff": 1024}, "d_ff is 1024; in a recurrent network it must be 256"),
        (RECURRENT, {"positions": "learned"}, "positions is learned; .* it must be none"),
        (RECURRENT, {"qkv_bias": True}, "qkv_bias is True; .* it must be False"),
        (RECURRENT, {"d_model": 255, "head_size": 255, "d_ff": 255}, "255; .* even number"),
    ],
)
def test_what_other_families_have_not_is_refused_by_name(
    base: ModelConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(base, **changes)


def test_unknown_cells_and_contexts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cell is 'lru'; it must be one of rnn, gru, lstm"):
        Recurrence(cell="lru", context="fixed")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"context is 'luong'; .* fixed, bahdanau"):
        Recurrence(cell="gru", context="luong")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name: str) -> None:
    config = preset(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_settings_that_came_later_are_written_only_where_they_say_something() -> None:
    assert "window" not in CAUSAL.to_dict()
    assert "experts" not in CAUSAL.to_dict()
    later = dataclasses.replace(CAUSAL, window=8, attention_scale=0.5)
    assert later.to_dict() == {**CAUSAL.to_dict(), "window": 8, "attention_scale": 0.5}
    assert ModelConfig.from_dict(json.loads(json.dumps(later.to_dict()))) == later


def test_every_so_many_layers_one_sees_all() -> None:
    config = dataclasses.replace(CAUSAL, window=8, window_pattern=3)
    assert [config.window_of(layer) for layer in range(7)] == [8, 8, 0, 8, 8, 0, 8]
    assert dataclasses.replace(CAUSAL, window=8).window_of(2) == 8


LATENT = {"rank": 16, "rope_size": 8, "nope_size": 8, "value_size": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": -1}, "window is -1"),
        ({"window_pattern": 2}, "need a window"),
        ({"attention_soft_cap": -1.0}, r"attention_soft_cap is -1\.0"),
        ({"attention_scale": 0.0}, r"attention_scale is 0\.0"),
        ({"attention_scale": "1"}, "attention_scale is '1'; it must be a finite number"),
        ({"qk_norm": "layer"}, "it must be one of none, head, width"),
        ({"experts": {"number": 4, "per_token": 5, "d_expert": 8}}, "per_token is 5"),
        (
            {"experts": {"number": 4, "per_token": 1, "d_expert": 8, "groups": 3}},
            "4 experts can't be cut into 3 groups",
        ),
        ({"experts": {"number": 4, "per_token": 1}}, r"experts\.d_expert is missing"),
        ({"experts": {"number": 4, "per_token": 1, "d_expert": 8, "clamp": -1.0}}, "clamp of the"),
        ({"latent": LATENT, "attention_sinks": True, "head_size": 16}, "and attention_sinks"),
        ({"short_conv": {"taps": 17, "layers": [0]}}, "taps is 17"),
        ({"short_conv": {"taps": 3, "layers": []}}, "needs one at least"),
        ({"short_conv": {"taps": 3, "layers": [1, 0]}}, r"layers \[1, 0\]"),
        ({"short_conv": {"taps": 3, "layers": [0, 99]}}, r"layers \[0, 99\]; there are"),
        ({"short_conv": {"taps": 3, "layers": [0]}, "d_model": 40}, "a multiple of 32, not 40"),
        ({"latent": LATENT | {"rope_size": 10}}, "nope_size \\+ rope_size, 18"),
        ({"latent": LATENT | {"rank": 0}}, "rank is 0"),
        ({"colour": "red", "age": 3}, "age is unknown"),
        ({"d_model": "256"}, "d_model is '256'; it must be a whole number"),
        ({"d_model": 256.5}, r"d_model is 256\.5; it must be a whole number"),
        ({"d_model": True}, "d_model is True; it must be a whole number"),
        ({"dropout": "0"}, "dropout is '0'; it must be a finite number"),
        ({"qkv_bias": 1}, "qkv_bias is 1; it must be true or false"),
        ({"family": None}, "family is None"),
        ({"rotary_scaling": 2.0}, r"rotary_scaling is 2\.0; it must be an object"),
        ({"rotary_scaling": {"kind": "linear"}}, r"rotary_scaling\.factor is missing"),
    ],
)
def test_json_that_is_no_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**CAUSAL.to_dict(), "activation": "swiglu", **changes})


def test_rotary_scaling_survives_json() -> None:
    scaling = RotaryScaling(kind="llama3", factor=8.0, original_context=4096)
    config = dataclasses.replace(CAUSAL, rotary_scaling=scaling)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_short_convolutions_survive_json() -> None:
    conv = ShortConv(taps=3, layers=(0,))
    config = dataclasses.replace(CAUSAL, d_model=64, short_conv=conv)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.cached_of(0) == (2, 16, 16)
    assert config.cached_of(1) == config.cached


def test_missing_settings_are_listed() -> None:
    values = CAUSAL.to_dict()
    del values["norm"], values["d_ff"]
    with pytest.raises(ConfigError, match="d_ff is missing"):
        ModelConfig.from_dict(values)


def test_settings_with_a_default_may_be_left_out() -> None:
    values = CAUSAL.to_dict()
    del values["norm_eps"], values["rotary_scaling"]
    assert ModelConfig.from_dict(values) == CAUSAL

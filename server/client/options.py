# Generated from server/fields.py by server/client/generate.py: don't edit.
"""Types of the options of requests. What they mean is in server/fields.py."""

from collections.abc import Mapping, Sequence
from typing import TypedDict


class GenerateOptions(TypedDict, total=False):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_new_tokens: int
    num_sequences: int
    logprobs: int
    prompt_logprobs: int
    echo: bool
    priority: int
    num_beams: int
    length_penalty: float
    early_stopping: str | int


class EmbedOptions(TypedDict, total=False):
    pooling: str | int
    normalize: bool
    dimensions: int
    priority: int

"""What a request may ask, and what its refusal says."""

import math
from typing import Any

import pytest

from quill.server.errors import InvalidFieldError
from quill.server.request import Request, SamplingParams

BAD_SAMPLING: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
    ("top_k", -1),
    *(("top_p", value) for value in (0.0, 2.0, -0.5, math.nan)),
    *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
    *(("repetition_penalty", value) for value in (0.0, 5e-324, 101.0, math.nan)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, math.nan)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan)),
    *(("logit_bias", {7: value}) for value in (101.0, -101.0, math.nan)),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
]
BAD_REQUEST: list[tuple[str, Any]] = [
    ("max_new_tokens", -1),
    ("num_sequences", 0),
    ("logprobs", 21),
    ("logprobs", -1),
    ("prompt_logprobs", 21),
    ("priority", 11),
    ("priority", -11),
]


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING)
def test_sampling_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(("name", "value"), BAD_REQUEST)
def test_request_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError, match=name) as caught:
        Request(request_id="r", prompt_ids=(1,), **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("sampling", "adjusts"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(frequency_penalty=-1), True),
        (SamplingParams(presence_penalty=1), True),
        (SamplingParams(logit_bias={3: 1.0}), True),
    ],
)
def test_sampling_knows_whether_it_changes_logits(sampling: SamplingParams, adjusts: bool) -> None:
    assert sampling.adjusts == adjusts

"""Tensors become the message that gRPC's own clients would send."""

import json
from typing import Any

import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.errors import InvalidFieldError
from quill.server.kserve.requests import Inference, read_inference, timeout_s
from quill.server.kserve.tensors import write_parameter
from tests.server.kserve.asking import asking


def reading(
    options: dict[str, Any] | None = None, continues: bool = True, **tensors: Any
) -> Inference:
    tensors = {"text_input": "Once"} | tensors
    if options is not None:
        tensors["sampling_parameters"] = json.dumps(options)
    return read_inference(asking(**tensors), continues)


def test_text_alone_has_the_defaults_of_vllm() -> None:
    inference = reading()
    assert inference.message == pb.GenerateRequest(prompt="Once", max_new_tokens=16)
    assert (inference.id, inference.model_name) == ("7", "quill")
    assert (inference.stream, inference.prefix) == (False, "Once")
    assert inference.wanted == {"text_output"}


def test_options_have_vllms_names_and_may_be_strings() -> None:
    options = {
        "max_tokens": "20",
        "temperature": "0.5",
        "top_k": -1,
        "ignore_eos": "True",
        "n": 2,
        "seed": -1,
        "stop": "end",
        "logprobs": 3,
        "priority": 2,
        "top_p": None,
        "of tomorrow": 1,
    }
    assert reading(options).message == pb.GenerateRequest(
        prompt="Once",
        max_new_tokens=20,
        temperature=0.5,
        top_k=0,
        ignore_eos=True,
        num_sequences=2,
        seed=2**64 - 1,
        stop=["end"],
        logprobs=3,
        priority=-2,
    )


def test_parameters_are_options_where_there_is_no_tensor() -> None:
    given: dict[str, bool | float | str] = {
        "temperature": 0.0,
        "max_tokens": 5,
        "priority": 3,
        "sequence_id": 9,
        "triton_enable_empty_final_response": True,
    }
    parameters = {name: write_parameter(value) for name, value in given.items()}
    message = read_inference(asking(parameters, text_input="Once"), True).message
    assert (message.temperature, message.max_new_tokens, message.priority) == (0.0, 5, -3)
    options = json.dumps({"max_tokens": 6})
    request = asking(parameters, text_input="Once", sampling_parameters=options)
    message = read_inference(request, True).message
    assert (message.HasField("temperature"), message.max_new_tokens) == (False, 6)
    assert message.priority == -3, "it is Triton's own, beside the tensors"


def test_input_is_part_of_the_output_as_the_backend_has_it() -> None:
    assert reading().prefix == "Once"
    assert reading(exclude_input_in_output=True).prefix == ""
    assert reading(stream=True).prefix == ""
    assert reading(continues=False).prefix == "", "a translation doesn't begin with its source"
    with pytest.raises(InvalidFieldError, match="is false and stream is true"):
        reading(stream=True, exclude_input_in_output=False)


def test_ids_and_conversations_are_taken_instead_of_text() -> None:
    ids = read_inference(asking(input_ids=[1, 2]), True)
    assert list(ids.message.prompt_ids.ids) == [1, 2]
    said = [{"role": "user", "content": "Hello"}]
    chat = read_inference(asking(messages=json.dumps(said)), True)
    assert chat.message.messages.messages[0] == pb.Message(role="user", content="Hello")
    assert ids.prefix == chat.prefix == ""


def test_outputs_are_given_on_demand() -> None:
    inference = reading(return_finish_reason=True, return_logprobs=False, return_token_ids=True)
    assert inference.wanted == {"text_output", "finish_reason", "token_ids"}
    request = asking(text_input="Once", return_finish_reason=True)
    request.outputs.add(name="finish_reason")
    request.outputs.add(name="logprobs")  # perf_analyzer names all that there are
    assert read_inference(request, True).wanted == {"finish_reason"}
    request.outputs.add(name="mood")
    with pytest.raises(InvalidFieldError, match="outputs have 'mood'; there are text_output, "):
        read_inference(request, True)


def test_sum_of_logprobs_needs_logprobs() -> None:
    assert not reading().message.HasField("logprobs")
    assert reading(return_cumulative_logprob=True).message.HasField("logprobs")
    assert reading({"logprobs": 2}, return_cumulative_logprob=True).message.logprobs == 2


@pytest.mark.parametrize(("tensors", "field"), [
    ({}, "inputs"),
    ({"text_input": "a", "input_ids": [1]}, "inputs"),
    ({"text_input": "a", "sampling_parameters": "["}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": "[" * 100_000}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": "[]"}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": '{"stop": "\\ud800"}'}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": '{"temperature": "warm"}'}, "temperature"),
    ({"text_input": "a", "sampling_parameters": '{"guided_json": 5}'}, "guided_json"),
    ({"text_input": "a", "sampling_parameters": '{"tools": [{}]}'}, "tools"),
    ({"text_input": "a", "sampling_parameters": '{"tool_choice": "auto"}'}, "tool_choice"),
    ({"messages": '{"role": "user"}'}, "messages"),
    ({"messages": '[{"role": "user"}]'}, "content"),
])  # fmt: skip
def test_what_is_wrong_is_said_by_name(tensors: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_inference(asking(**tensors), True)
    assert caught.value.field == field


def test_text_must_be_utf8() -> None:
    request = asking(text_input="a")
    request.raw_input_contents[0] = b"\1\0\0\0\xff"
    with pytest.raises(InvalidFieldError, match="isn't UTF-8"):
        read_inference(request, True)


def test_time_is_in_microseconds() -> None:
    def given(**parameter: Any) -> kserve.ModelInferRequest:
        return asking({"timeout": kserve.InferParameter(**parameter)}, text_input="a")

    assert timeout_s(asking(text_input="a")) is None
    assert (
        timeout_s(given(int64_param=1_500_000)) == timeout_s(given(string_param="1500000")) == 1.5
    )
    for wrong in (given(int64_param=-1), given(string_param="soon")):
        with pytest.raises(InvalidFieldError, match="microseconds"):
            read_inference(wrong, True)


def test_refusals_have_the_names_that_the_client_knows() -> None:
    inference = reading({"n": 99})
    error = inference.as_written(InvalidFieldError("num_sequences", "is 99"))
    assert str(error) == "n is 99"

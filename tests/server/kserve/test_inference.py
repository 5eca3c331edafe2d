"""Tensors become a request, and outputs become tensors: whole, or in parts that add up."""

import json
from typing import Any

import pytest

from quill.protos import kserve_pb2 as kserve
from quill.server.errors import InvalidFieldError
from quill.server.frontend.answer import Chunk, Result
from quill.server.frontend.spec import ChatMessage, Conversation
from quill.server.kserve.inference import Inference, Responses, failure, read_inference, timeout_s
from quill.server.kserve.tensors import (
    INPUTS,
    OUTPUTS,
    config,
    metadata,
    read_parameter,
    unpack,
    write_parameter,
)
from quill.server.outputs import Alternative, FinishEvent, PositionLogprobs, Timings, Usage
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
    assert inference.spec.prompt == ("text_input", "Once")
    assert inference.spec.options == {"max_new_tokens": 16}
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
    assert reading(options).spec.options == {
        "max_new_tokens": 20, "temperature": 0.5, "top_k": 0, "ignore_eos": True,
        "num_sequences": 2, "seed": 2**64 - 1, "stop": ["end"], "logprobs": 3, "priority": -2,
    }  # fmt: skip


def test_parameters_are_options_where_there_is_no_tensor() -> None:
    given: dict[str, bool | float | str] = {
        "temperature": 0.0,
        "max_tokens": 5,
        "priority": 3,
        "sequence_id": 9,
        "triton_enable_empty_final_response": True,
    }
    parameters = {name: write_parameter(value) for name, value in given.items()}
    given_options = read_inference(asking(parameters, text_input="Once"), True).spec.options
    assert given_options == {"temperature": 0.0, "max_new_tokens": 5, "priority": -3}
    options = json.dumps({"max_tokens": 6})
    request = asking(parameters, text_input="Once", sampling_parameters=options)
    # The priority is Triton's own, beside the tensors.
    assert read_inference(request, True).spec.options == {"max_new_tokens": 6, "priority": -3}


def test_input_is_part_of_the_output_as_the_backend_has_it() -> None:
    assert reading().prefix == "Once"
    assert reading(exclude_input_in_output=True).prefix == ""
    assert reading(stream=True).prefix == ""
    assert reading(continues=False).prefix == "", "a translation doesn't begin with its source"
    with pytest.raises(InvalidFieldError, match="is false and stream is true"):
        reading(stream=True, exclude_input_in_output=False)


def test_ids_and_conversations_are_taken_instead_of_text() -> None:
    ids = read_inference(asking(input_ids=[1, 2]), True)
    assert ids.spec.prompt == ("input_ids", [1, 2])
    said = [{"role": "user", "content": "Hello"}]
    chat = read_inference(asking(messages=json.dumps(said)), True)
    messages = Conversation([ChatMessage(role="user", content="Hello")])
    assert chat.spec.prompt == ("messages", messages)
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
    assert "logprobs" not in reading().spec.options
    assert reading(return_cumulative_logprob=True).spec.options["logprobs"] == 0
    assert reading({"logprobs": 2}, return_cumulative_logprob=True).spec.options["logprobs"] == 2


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


TOP = (Alternative(5, -0.5), Alternative(6, -1.5))
TOKEN, RARE = PositionLogprobs(5, -0.5, TOP), PositionLogprobs(9, -7.0, TOP)


def finish(sequence: int, reason: Any) -> FinishEvent:
    usage, timings = Usage(prompt=3, cached=2, generated=2), Timings(1.0, 2.0, 3.0)
    return FinishEvent("id", sequence, reason, 2**64 - 1, usage, timings)


def responses_to(n: int = 1) -> Responses:
    flags: dict[str, Any] = {name: True for name in INPUTS if name.startswith("return_")}
    return Responses(reading({"n": n}, **flags), n, None)


def outputs(response: kserve.ModelInferResponse) -> dict[str, list[Any]]:
    found = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        tensor = OUTPUTS[output.name]
        assert output.datatype == tensor.datatype
        found[output.name] = unpack(tensor, raw)
        assert list(output.shape) == [len(found[output.name])]
    return found


def parameters(response: kserve.ModelInferResponse) -> dict[str, Any]:
    return {name: read_parameter(value) for name, value in response.parameters.items()}


def test_whole_answer() -> None:
    chunk = Chunk(0, " upon", [5, 9], [TOKEN, RARE], finish=finish(0, "eos"))
    response = responses_to().whole(Result([chunk]))
    found = outputs(response)
    assert found["text_output"] == [b"Once upon"]
    assert found["finish_reason"] == [b"stop"]
    assert found["cumulative_logprob"] == [-7.5]
    assert (found["num_input_tokens"], found["num_output_tokens"]) == ([3], [2])
    assert json.loads(found["token_ids"][0]) == [5, 9]
    assert json.loads(found["logprobs"][0])[1] == {
        "9": {"logprob": -7.0, "rank": None, "decoded_token": ""},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": ""},
        "6": {"logprob": -1.5, "rank": 2, "decoded_token": ""},
    }
    assert (response.id, response.model_name, response.model_version) == ("7", "quill", "1")
    end = parameters(response)
    assert end["triton_final_response"] is True
    assert (end["quill_seed"], end["quill_finish_reason"]) == (2**64 - 1, "FINISH_REASON_EOS")


def test_parts_have_what_is_new_of_each_sequence() -> None:
    answer = responses_to(2)
    chunks = [
        Chunk(1, "x", [5], [TOKEN]),
        Chunk(0, "y", [9], [RARE], finish=finish(0, "eos")),
        Chunk(1, "z", [5], [TOKEN], finish=finish(1, "length")),
    ]
    responses = [answer.part(chunk) for chunk in chunks]
    found = [outputs(response) for response in responses]
    assert [each["text_output"] for each in found] == [[b"", b"x"], [b"y", b""], [b"", b"z"]]
    assert [each["finish_reason"] for each in found] == [
        [b"None", b"None"],
        [b"stop", b"None"],
        [b"stop", b"length"],
    ]
    assert [each["num_output_tokens"] for each in found] == [[0, 1], [1, 0], [0, 1]]
    assert found[2]["cumulative_logprob"] == [-7.0, -1.0]
    assert "num_input_tokens" not in found[0], "it isn't known before an end"
    assert found[1]["num_input_tokens"] == [3]
    finals = [parameters(response)["triton_final_response"] for response in responses]
    assert finals == [False, False, True]
    assert "quill_seed" in parameters(responses[1])
    assert "quill_seed" not in parameters(responses[2]), "sequence 0's counts"


def test_failure_names_the_status_and_the_request() -> None:
    response = failure(asking(text_input="a"), InvalidFieldError("top_p", "is 2"))
    assert response.error_message == "INVALID_ARGUMENT: top_p is 2"
    assert response.infer_response.id == "7"
    assert parameters(response.infer_response) == {"triton_final_response": True}


def test_card_and_configuration_have_the_same_tensors() -> None:
    card, configured = metadata("quill"), config("quill")
    assert card.name == configured.name == "quill"
    assert [each.name for each in card.inputs] == [each.name for each in configured.input]
    assert [each.name for each in card.outputs] == [each.name for each in configured.output]
    assert [each.name for each in configured.input if not each.optional] == ["text_input"]
    assert configured.model_transaction_policy.decoupled
    assert configured.max_batch_size == 0

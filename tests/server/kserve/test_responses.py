"""Answers become tensors: whole ones, and parts that put together are the same."""

import json
from typing import Any

import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.errors import InvalidFieldError
from quill.server.kserve.model_card import INPUTS, OUTPUTS, config, metadata
from quill.server.kserve.requests import Inference, read_inference
from quill.server.kserve.responses import Answering, failure
from quill.server.kserve.tensors import read_parameter, unpack
from tests.server.kserve.asking import asking

TOP = [pb.Alternative(token_id=5, logprob=-0.5, text="a"), pb.Alternative(token_id=6, logprob=-1.5)]
TOKEN = pb.TokenLogprobs(token_id=5, logprob=-0.5, text="a", top=TOP)
RARE = pb.TokenLogprobs(token_id=9, logprob=-7.0, text="b", top=TOP)
ENDED: dict[str, Any] = {
    "finish_reason": pb.FINISH_REASON_EOS,
    "usage": pb.Usage(prompt_tokens=3, cached_tokens=2, generated_tokens=2),
    "seed": 2**64 - 1,
    "request_id": "id",
    "timings": pb.Timings(queue_ms=1.0, first_token_ms=2.0, total_ms=3.0),
}


def wanting(n: int = 1) -> Inference:
    flags: dict[str, Any] = {name: True for name in INPUTS if name.startswith("return_")}
    options = json.dumps({"n": n})
    return read_inference(asking(text_input="Once", sampling_parameters=options, **flags), True)


def outputs(response: kserve.ModelInferResponse) -> dict[str, list[Any]]:
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    found = {}
    for told, raw in pairs:
        tensor = OUTPUTS[told.name]
        assert told.datatype == tensor.datatype
        found[told.name] = unpack(tensor, raw)
        assert list(told.shape) == [len(found[told.name])]
    return found


def parameters(response: kserve.ModelInferResponse) -> dict[str, Any]:
    return {name: read_parameter(value) for name, value in response.parameters.items()}


def test_whole_answer() -> None:
    sequence = pb.Sequence(
        text=" upon", token_ids=[5, 9], finish_reason=pb.FINISH_REASON_EOS, logprobs=[TOKEN, RARE]
    )
    rest = {name: value for name, value in ENDED.items() if name != "finish_reason"}
    response = Answering(wanting()).whole(pb.GenerateResponse(sequences=[sequence], **rest))
    told = outputs(response)
    assert told["text_output"] == [b"Once upon"]
    assert told["finish_reason"] == [b"stop"]
    assert told["cumulative_logprob"] == [-7.5]
    assert (told["num_input_tokens"], told["num_output_tokens"]) == ([3], [2])
    assert json.loads(told["token_ids"][0]) == [5, 9]
    assert json.loads(told["logprobs"][0])[1] == {
        "9": {"logprob": -7.0, "rank": None, "decoded_token": "b"},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "6": {"logprob": -1.5, "rank": 2, "decoded_token": ""},
    }
    assert (response.id, response.model_name, response.model_version) == ("7", "quill", "1")
    said = parameters(response)
    assert said["triton_final_response"] is True
    assert (said["quill_seed"], said["quill_finish_reason"]) == (2**64 - 1, "FINISH_REASON_EOS")


def test_parts_tell_what_is_new_of_each_sequence() -> None:
    answer = Answering(wanting(n=2))
    length = {**ENDED, "finish_reason": pb.FINISH_REASON_LENGTH}
    chunks = [
        pb.GenerateChunk(sequence=1, text="x", token_ids=[5], logprobs=[TOKEN]),
        pb.GenerateChunk(sequence=0, text="y", token_ids=[9], logprobs=[RARE], **ENDED),
        pb.GenerateChunk(sequence=1, text="z", token_ids=[5], logprobs=[TOKEN], **length),
    ]
    responses = [answer.part(chunk) for chunk in chunks]
    told = [outputs(response) for response in responses]
    assert [each["text_output"] for each in told] == [[b"", b"x"], [b"y", b""], [b"", b"z"]]
    assert [each["finish_reason"] for each in told] == [
        [b"None", b"None"],
        [b"stop", b"None"],
        [b"stop", b"length"],
    ]
    assert [each["num_output_tokens"] for each in told] == [[0, 1], [1, 0], [0, 1]]
    assert told[2]["cumulative_logprob"] == [-7.0, -1.0]
    assert "num_input_tokens" not in told[0], "it isn't known before an end"
    assert told[1]["num_input_tokens"] == [3]
    finals = [parameters(response)["triton_final_response"] for response in responses]
    assert finals == [False, False, True]
    assert "quill_seed" in parameters(responses[1])
    assert "quill_seed" not in parameters(responses[2]), "sequence 0's counts"


def test_failure_names_the_status_and_the_request() -> None:
    told = failure(asking(text_input="a"), InvalidFieldError("top_p", "is 2"))
    assert told.error_message == "INVALID_ARGUMENT: top_p is 2"
    assert told.infer_response.id == "7"
    assert parameters(told.infer_response) == {"triton_final_response": True}


@pytest.mark.parametrize("name", ["quill", "smollm2-135m"])
def test_card_and_configuration_say_the_same(name: str) -> None:
    told, configured = metadata(name), config(name)
    assert told.name == configured.name == name
    assert [each.name for each in told.inputs] == [each.name for each in configured.input]
    assert [each.name for each in told.outputs] == [each.name for each in configured.output]
    assert [each.name for each in configured.input if not each.optional] == ["text_input"]
    assert configured.model_transaction_policy.decoupled
    assert configured.max_batch_size == 0

"""Triton's own client over KServe v2, against a real server: sync, asyncio, streams, errors."""

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

triton = pytest.importorskip(
    "tritonclient.grpc", reason="tritonclient isn't installed here: make test-clients has it"
)

import numpy as np  # noqa: E402
import tritonclient.grpc.aio as triton_aio  # noqa: E402

from tests.clients.conftest import PATIENCE_S, Server  # noqa: E402

TEXT = "The capital of France is"
GENERATE = """
import json, sys
from quill.client import Access, Client
address, key, text = sys.argv[1:]
with Client(address, access=Access(api_key=key, insecure=True)) as client:
    whole = client.generate(text, max_new_tokens=12, seed=7, temperature=0.8)
    print(json.dumps([whole.sequences[0].text, list(whole.sequences[0].token_ids)]))
"""
DRAWN = {"max_tokens": 12, "seed": 7, "temperature": 0.8}


def proof(server: Server) -> dict[str, str]:
    return {"authorization": f"Bearer {server.key}"}


def tensor(name: str, value: Any) -> Any:
    is_flag = isinstance(value, bool)
    made = triton.InferInput(name, [1], "BOOL" if is_flag else "BYTES")
    content = value if is_flag else value.encode()
    made.set_data_from_numpy(np.array([content], dtype=bool if is_flag else object))
    return made


def asking(text: str = TEXT, options: dict[str, Any] | None = None, **flags: bool) -> list[Any]:
    tensors = [tensor("text_input", text)]
    tensors += [tensor("sampling_parameters", json.dumps(DRAWN if options is None else options))]
    return tensors + [tensor(name, value) for name, value in flags.items()]


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


class Stream:
    """Answers of one stream, as they come."""

    def __init__(self, client: Any, server: Server) -> None:
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(
            callback=lambda result, error: self.answers.put((result, error)),
            headers=proof(server),
        )

    def text(self) -> str:
        told = ""
        while True:
            result, error = self.answers.get(timeout=PATIENCE_S)
            assert error is None, error
            told += text_of(result)
            if is_final(result):
                return told


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as made:
        yield made


@pytest.fixture(scope="module")
def ours(server: Server) -> tuple[str, list[int]]:
    """What Quill's own client hears."""
    text, ids = json.loads(server.ours(GENERATE, TEXT))
    return text, ids


def test_server_and_model_are_described(server: Server, client: Any) -> None:
    headers = proof(server)
    assert client.is_server_live(headers=headers)
    assert client.is_server_ready(headers=headers)
    assert client.is_model_ready("quill", headers=headers)
    assert client.is_model_ready(server.model, "1", headers=headers)
    assert not client.is_model_ready("another", headers=headers)
    assert client.get_server_metadata(headers=headers).name == "quill"
    told = client.get_model_metadata("quill", headers=headers)
    assert [told.inputs[0].name, told.outputs[0].name] == ["text_input", "text_output"]
    config = client.get_model_config("quill", headers=headers).config
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0


def test_our_description_of_the_protocol_is_theirs(server: Server) -> None:
    """Every field that we know has their number and type."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    code = (
        "from quill.protos import kserve_pb2 as k; from google.protobuf import descriptor_pb2 as d;"
        "p = d.FileDescriptorProto(); k.DESCRIPTOR.CopyToProto(p);"
        "print(p.SerializeToString().hex())"
    )
    ours = FileDescriptorProto.FromString(bytes.fromhex(server.ours(code)))
    from tritonclient.grpc import model_config_pb2, service_pb2

    theirs: dict[str, tuple[int, int, int]] = {}
    for module in (service_pb2, model_config_pb2):
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        theirs |= fields_of(file.message_type)
    known = fields_of(ours.message_type)
    assert len(known) > 80
    assert {name: theirs.get(name) for name in known} == known


def fields_of(messages: Any, prefix: str = "") -> dict[str, tuple[int, int, int]]:
    found = {}
    for message in messages:
        name = f"{prefix}{message.name}."
        for each in message.field:
            found[f"{name}{each.name}"] = (each.number, each.type, each.label)
        found |= fields_of(message.nested_type, name)
    return found


def test_answer_is_that_of_our_own_client(
    server: Server, client: Any, ours: tuple[str, list[int]]
) -> None:
    tensors = asking(exclude_input_in_output=True, return_token_ids=True, return_finish_reason=True)
    result = client.infer("quill", tensors, headers=proof(server), request_id="one")
    assert text_of(result) == ours[0]
    assert json.loads(result.as_numpy("token_ids")[0]) == ours[1]
    assert result.as_numpy("finish_reason")[0] == b"length"
    assert result.get_response().id == "one"
    whole = client.infer("quill", asking(), headers=proof(server))
    assert text_of(whole) == TEXT + ours[0]


def test_streamed_answer_is_the_same(
    server: Server, client: Any, ours: tuple[str, list[int]]
) -> None:
    stream = Stream(client, server)
    for final in (True, False):
        client.async_stream_infer(
            "quill", asking(stream=True), enable_empty_final_response=final, request_id="1"
        )
        assert stream.text() == ours[0]
    client.stop_stream()


def test_options_may_be_strings_and_outputs_may_be_named(server: Server, client: Any) -> None:
    options = {"max_tokens": "5", "temperature": "0", "logprobs": "2", "n": "2"}
    flags: dict[str, Any] = {"return_logprobs": True, "return_num_output_tokens": True}
    flags |= {"return_num_input_tokens": True, "return_cumulative_logprob": True}
    names = ("logprobs", "num_output_tokens", "num_input_tokens", "cumulative_logprob")
    result = client.infer(
        "quill",
        asking(options=options, **flags),
        outputs=[triton.InferRequestedOutput(name) for name in names],
        headers=proof(server),
    )
    assert result.as_numpy("text_output") is None
    assert result.as_numpy("num_output_tokens").tolist() == [5, 5]
    assert result.as_numpy("num_input_tokens").tolist() == [5]
    first, second = result.as_numpy("logprobs")
    assert first == second
    assert len(json.loads(first)) == 5
    total = sum(max(each["logprob"] for each in token.values()) for token in json.loads(first))
    assert result.as_numpy("cumulative_logprob")[0] == pytest.approx(total, rel=1e-5)


def test_errors_have_words(server: Server, client: Any) -> None:
    for tensors, name, status in (
        (asking(options={"top_p": 3}), "quill", "INVALID_ARGUMENT"),
        (asking(stream=True), "quill", "INVALID_ARGUMENT"),
        (asking(), "another", "NOT_FOUND"),
    ):
        with pytest.raises(triton.InferenceServerException) as refused:
            client.infer(name, tensors, headers=proof(server))
        assert status in str(refused.value.status())
    with pytest.raises(triton.InferenceServerException) as refused:
        client.infer("quill", asking())
    assert "UNAUTHENTICATED" in str(refused.value.status())


def test_cancelled_stream_ends_at_once(server: Server, client: Any) -> None:
    stream = Stream(client, server)
    endless = {"max_tokens": 4000, "ignore_eos": True}
    client.async_stream_infer("quill", asking(options=endless, stream=True))
    stream.answers.get(timeout=PATIENCE_S)
    client.stop_stream(cancel_requests=True)
    lines = server.lines()
    while not any(
        line["outcome"] == "CANCELLED" and line["frontend"] == "kserve" for line in lines
    ):
        client.infer("quill", asking(options={"max_tokens": 1}), headers=proof(server))
        lines = server.lines()


def test_asyncio(server: Server, ours: tuple[str, list[int]]) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(2):
            yield {
                "model_name": "quill",
                "inputs": asking(stream=True),
                "request_id": str(number),
                "enable_empty_final_response": True,
            }

    async def ask() -> dict[str, str]:
        told = {"0": "", "1": ""}
        async with triton_aio.InferenceServerClient(server.address) as client:
            assert await client.is_model_ready("quill", headers=proof(server))
            result = await client.infer("quill", asking(), headers=proof(server))
            assert text_of(result) == TEXT + ours[0]
            async for result, error in client.stream_infer(requests(), headers=proof(server)):
                assert error is None
                told[result.get_response().id] += text_of(result)
        return told

    assert asyncio.run(ask()) == {"0": ours[0], "1": ours[0]}

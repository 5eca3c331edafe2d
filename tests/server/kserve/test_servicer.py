"""KServe's calls against a server that recites: answers, streams, ends, keys, broken bytes."""

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.protos import kserve_pb2 as kserve
from quill.protos import kserve_pb2_grpc as kserve_grpc
from quill.server.auth.key_file import add_key
from quill.server.kserve.tensors import OUTPUTS, unpack
from tests.server.kserve.asking import asking
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

Stub = kserve_grpc.GRPCInferenceServiceStub
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture
def running() -> Iterator[Running]:
    with running_server() as server:
        yield server


@pytest.fixture
def stub(running: Running) -> Iterator[Stub]:
    with grpc.insecure_channel(running.address) as channel:
        yield Stub(channel)


def ask(text: str = "abc", stream: bool = False, **options: Any) -> kserve.ModelInferRequest:
    sampling = json.dumps({"max_tokens": 4} | options)
    return asking(text_input=text, stream=stream, sampling_parameters=sampling)


def text_of(response: kserve.ModelInferResponse) -> str:
    place = [each.name for each in response.outputs].index("text_output")
    (text,) = unpack(OUTPUTS["text_output"], response.raw_output_contents[place])
    return bytes(text).decode()


def is_final(response: kserve.ModelInferResponse) -> bool:
    return response.parameters["triton_final_response"].bool_param


class Conversation:
    """A stream that stays open: requests are sent when it is told to."""

    def __init__(self, stub: Stub) -> None:
        self._requests: queue.Queue[kserve.ModelInferRequest | None] = queue.Queue()
        self.call = stub.ModelStreamInfer(iter(self._requests.get, None), timeout=TIMEOUT_S)

    def send(self, request: kserve.ModelInferRequest) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)

    def read_all(self, id: str) -> str:
        text = ""
        for response in self.call:
            assert not response.error_message
            assert response.infer_response.id == id
            text += text_of(response.infer_response)
            if is_final(response.infer_response):
                return text
        raise AssertionError("the stream ended before the answer did")


def test_server_and_model_are_described(stub: Stub) -> None:
    assert stub.ServerLive(kserve.ServerLiveRequest()).live
    assert stub.ServerReady(kserve.ServerReadyRequest()).ready
    assert stub.ServerMetadata(kserve.ServerMetadataRequest()).name == "quill"
    for name in ("quill", "reciter"):
        assert stub.ModelReady(kserve.ModelReadyRequest(name=name, version="1")).ready
        assert stub.ModelMetadata(kserve.ModelMetadataRequest(name=name)).inputs
        config = stub.ModelConfig(kserve.ModelConfigRequest(name=name)).config
        assert config.model_transaction_policy.decoupled


def test_other_models_and_versions_are_not_found(stub: Stub) -> None:
    assert not stub.ModelReady(kserve.ModelReadyRequest(name="other")).ready
    for call in (
        lambda: stub.ModelMetadata(kserve.ModelMetadataRequest(name="other")),
        lambda: stub.ModelConfig(kserve.ModelConfigRequest(name="quill", version="2")),
        lambda: stub.ModelStatistics(kserve.ModelStatisticsRequest(name="other")),
        lambda: stub.ModelInfer(kserve.ModelInferRequest(model_name="other")),
    ):
        with pytest.raises(grpc.RpcError, match="there is 'reciter', which is also 'quill'") as no:
            call()
        assert no.value.code() is grpc.StatusCode.NOT_FOUND


def test_nothing_is_ready_before_the_model_is_loaded() -> None:
    with running_server(wait=False) as loading, grpc.insecure_channel(loading.address) as channel:
        stub = Stub(channel)
        assert stub.ServerLive(kserve.ServerLiveRequest()).live
        assert not stub.ServerReady(kserve.ServerReadyRequest()).ready
        assert not stub.ModelReady(kserve.ModelReadyRequest(name="quill")).ready
        with pytest.raises(grpc.RpcError) as no:
            stub.ModelInfer(ask())
        assert no.value.code() is grpc.StatusCode.UNAVAILABLE


def test_same_request_has_the_same_answer_as_over_grpc(running: Running, stub: Stub) -> None:
    options = {"seed": 5, "temperature": 1.5, "max_tokens": 20, "n": 2}
    flags: dict[str, Any] = {"return_token_ids": True, "exclude_input_in_output": True}
    sampling = json.dumps(options)
    told = stub.ModelInfer(asking(text_input="abc", sampling_parameters=sampling, **flags))
    with grpc.insecure_channel(running.address) as channel:
        request = pb.GenerateRequest(
            prompt="abc", seed=5, temperature=1.5, max_new_tokens=20, num_sequences=2
        )
        whole = pb_grpc.TextGenerationStub(channel).Generate(request)
    names = [each.name for each in told.outputs]
    raw = told.raw_output_contents[names.index("token_ids")]
    ids = [json.loads(each) for each in unpack(OUTPUTS["token_ids"], raw)]
    assert ids == [list(each.token_ids) for each in whole.sequences]
    assert told.parameters["quill_seed"].uint64_param == 5


def test_input_comes_before_the_answer_unless_it_is_left_out(stub: Stub) -> None:
    assert text_of(stub.ModelInfer(ask("abc"))) == "abcdefg"
    request = asking(text_input="abc", exclude_input_in_output=True)
    assert text_of(stub.ModelInfer(request)) == "defghijklmnopqrs", "16 tokens, as with vLLM"


def test_call_is_accounted_for_once_and_names_its_door(running: Running, stub: Stub) -> None:
    stub.ModelInfer(ask())
    record = running.next_record("OK")
    assert record.method == "ModelInfer"
    assert running.records.empty()
    assert (record.frontend, record.num_generated, record.finish_reasons) == (
        "kserve",
        4,
        ["length"],
    )


def test_unary_call_streams_nothing(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError, match="ModelInfer answers once") as no:
        stub.ModelInfer(ask(stream=True))
    assert no.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_options_are_refused_by_the_names_that_clients_know(running: Running, stub: Stub) -> None:
    with pytest.raises(grpc.RpcError, match="n is 99; it must be from 1 to") as no:
        stub.ModelInfer(ask(n=99))
    assert no.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert running.next_record("INVALID_ARGUMENT").bad_field == "n"


def test_stream_tells_parts_and_then_takes_another_request(stub: Stub) -> None:
    conversation = Conversation(stub)
    conversation.send(ask("abc", stream=True))
    assert conversation.read_all("7") == "defg"
    conversation.send(ask("klm", stream=False))
    assert conversation.read_all("7") == "klmnopq"
    conversation.end()
    assert list(conversation.call) == []
    assert conversation.call.code() is grpc.StatusCode.OK


def test_failure_is_told_and_the_stream_goes_on(stub: Stub) -> None:
    conversation = Conversation(stub)
    conversation.send(ask(top_p=3))
    told = next(conversation.call)
    assert told.error_message.startswith("INVALID_ARGUMENT: top_p is 3")
    assert told.infer_response.id == "7"
    assert is_final(told.infer_response)
    conversation.send(ask("abc", stream=True))
    assert conversation.read_all("7") == "defg"
    conversation.end()


def test_requests_of_one_stream_run_side_by_side() -> None:
    with running_server() as server, grpc.insecure_channel(server.address) as channel:
        server.session.hold()
        conversation = Conversation(Stub(channel))
        for id in ("one", "two", "three"):
            request = ask("abc", stream=True)
            request.id = id
            conversation.send(request)
        server.wait_for_requests(3)
        server.session.let_go()
        texts = {"one": "", "two": "", "three": ""}
        num_final = 0
        while num_final < 3:
            told = next(conversation.call).infer_response
            texts[told.id] += text_of(told)
            num_final += is_final(told)
        assert set(texts.values()) == {"defg"}
        conversation.end()


def test_who_leaves_a_stream_leaves_all_its_requests() -> None:
    with running_server() as server, grpc.insecure_channel(server.address) as channel:
        server.session.hold()
        conversation = Conversation(Stub(channel))
        conversation.send(ask("abc", stream=True))
        conversation.send(ask("klm", stream=False))
        server.wait_for_requests(2)
        conversation.call.cancel()
        conversation.end()
        server.wait_for_requests(0)
        for _ in range(2):
            assert server.next_record("CANCELLED").frontend == "kserve"


def test_time_of_a_request_is_its_own(running: Running, stub: Stub) -> None:
    conversation = Conversation(stub)
    hurried = ask("abc", stream=True)
    hurried.parameters["timeout"].int64_param = 1
    conversation.send(hurried)
    assert next(conversation.call).error_message.startswith("DEADLINE_EXCEEDED: ")
    conversation.send(ask("abc", stream=True))
    assert conversation.read_all("7") == "defg"
    conversation.end()


def test_statistics_are_the_metrics_own(stub: Stub) -> None:
    def counted() -> kserve.ModelStatistics:
        response = stub.ModelStatistics(kserve.ModelStatisticsRequest(name="quill"))
        (told,) = response.model_stats
        return told

    before = counted()
    stub.ModelInfer(ask())
    after = counted()
    assert after.inference_count == before.inference_count + 1
    assert after.execution_count >= before.execution_count + 4
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    compute = after.inference_stats
    assert compute.compute_input.count == compute.compute_infer.count == after.inference_count
    assert after.inference_stats.queue.count == before.inference_stats.queue.count + 1


def test_bytes_that_are_no_message_end_a_stream_in_words(running: Running) -> None:
    with grpc.insecure_channel(running.address) as channel:
        call: Any = channel.stream_stream(STREAM)
        with pytest.raises(grpc.RpcError, match="message can't be read") as no:
            list(call(iter([b"\xff\xff"]), timeout=TIMEOUT_S))
        assert no.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    record = running.next_record("INVALID_ARGUMENT")
    assert (record.method, record.frontend, record.bad_field) == (
        *("ModelStreamInfer", "kserve"),
        "message",
    )


def test_keys_are_asked_for_here_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "alice")
    with running_server(api_keys=keys) as server, grpc.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        with pytest.raises(grpc.RpcError) as no:
            stub.ModelInfer(ask())
        assert no.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert server.next_record("UNAUTHENTICATED").frontend == "kserve"
        proof = (("authorization", f"Bearer {key}"),)
        assert text_of(stub.ModelInfer(ask(), metadata=proof)) == "abcdefg"
        assert server.next_record("OK").caller == "alice"


def test_reader_who_stops_reading_ends_the_stream_for_all_its_requests() -> None:
    with (
        running_server(write_timeout_s=0.3) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        conversation = Conversation(Stub(channel))
        for _ in range(4):  # far more than gRPC's windows hold
            request = ask("a", stream=True, n=4, logprobs=20, max_tokens=197)
            request.inputs.add(name="return_logprobs", datatype="BOOL", shape=[1])
            request.raw_input_contents.append(b"\1")
            conversation.send(request)
        assert server.next_record("ABORTED").frontend == "kserve"
        server.wait_for_requests(0)
        conversation.end()
        assert text_of(Stub(channel).ModelInfer(ask())) == "abcdefg"

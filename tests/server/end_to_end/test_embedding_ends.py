"""How calls of Embed end: cancelled, too late, over a quota; and how they are reported."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from tests.server.end_to_end.test_embedding import vectors
from tests.server.process import NEVER
from tests.server.running import Running, make_embedder, running_server
from tests.server.scripted_session import TIMEOUT_S, hidden_of, token_of


@pytest.fixture
def running() -> Iterator[Running]:
    with running_server(served=make_embedder(), metrics_port=0) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    with Client(running.address, NEVER) as client:
        yield client


def first_vectors(text: str) -> list[list[float]]:
    return [hidden_of(token_of(ord(each))) for each in text]


def test_call_is_accounted_for(running: Running, client: Client) -> None:
    response = client.embed(list("abc"), timeout_s=TIMEOUT_S)
    assert vectors(response) == first_vectors("abc")
    record = running.next_record("OK")
    assert (record.method, record.num_texts, record.num_prompt) == ("Embed", 3, 3)
    assert (record.finish_reasons, record.num_generated) == (["length"], 0)
    assert record.request_id == response.request_id
    metrics = running.server.metrics.registry
    assert metrics.get_sample_value("quill_embeddings_total") == 3
    assert metrics.get_sample_value("quill_tokens_total", {"kind": "prompt"}) == 3
    assert metrics.get_sample_value("quill_prefix_cache_misses_total") == 0
    labels = {"method": "Embed", "outcome": "OK"}
    assert metrics.get_sample_value("quill_requests_total", labels) == 1


def test_client_that_leaves_frees_its_place(running: Running, client: Client) -> None:
    running.session.hold()
    texts = [pb.EmbedInput(text="x" * 100) for _ in range(200)]
    with grpc.insecure_channel(running.address) as channel:
        call = pb_grpc.TextGenerationStub(channel).Embed.future(
            pb.EmbedRequest(inputs=texts), timeout=TIMEOUT_S
        )
        running.session.let_go(1)
        running.session.wait_for_steps(1)
        call.cancel()
        record = running.next_record("CANCELLED")
        assert (record.method, record.num_texts) == ("Embed", 200)
        running.session.let_go()
        assert vectors(client.embed("z", timeout_s=TIMEOUT_S)) == first_vectors("z")
    assert running.session.num_steps <= 3, "the one that was held back, and the other call's own"
    running.wait_for_requests(0)


def test_deadline_ends_the_whole_call(running: Running, client: Client) -> None:
    client.model(timeout_s=TIMEOUT_S)  # so that the call finds a connection
    running.session.hold()
    running.session.let_go(1)
    with pytest.raises(CallError) as caught:
        client.embed(["x" * 100] * 200, timeout_s=2.0)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    running.session.let_go()
    running.next_record("DEADLINE_EXCEEDED")
    assert vectors(client.embed("z", timeout_s=TIMEOUT_S)) == first_vectors("z")


def test_generation_goes_on_beside_many_texts(running: Running, client: Client) -> None:
    running.session.hold()
    chunks = client.stream("abc", max_new_tokens=20, timeout_s=TIMEOUT_S)
    running.session.let_go(1)
    said = next(chunks).text
    with grpc.insecure_channel(running.address) as channel:
        call = pb_grpc.TextGenerationStub(channel).Embed.future(
            pb.EmbedRequest(inputs=[pb.EmbedInput(text=each) for each in "xyz" * 100]),
            timeout=TIMEOUT_S,
        )
        running.wait_for_requests(2)
        running.session.let_go()
        said += "".join(chunk.text for chunk in chunks)
        assert vectors(call.result()) == first_vectors("xyz" * 100)
    assert said == "defghijklmnopqrstuvw"


def test_keys_limits_hold(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret = add_key(path, "limited", tokens_per_minute=120, max_prompt_tokens=10)
    with (
        running_server(served=make_embedder(), api_keys=path) as running,
        Client(running.address, NEVER, access=Access(api_key=secret)) as client,
    ):
        with pytest.raises(CallError, match="at most 10 are allowed with this API key") as caught:
            client.embed(["a", "x" * 11], timeout_s=TIMEOUT_S)
        assert (caught.value.code, caught.value.field) == (
            *(grpc.StatusCode.INVALID_ARGUMENT, "inputs[1].text"),
        )
        client.embed(["abc", "abcd"], timeout_s=TIMEOUT_S)  # 7 of the 20 that are there
        with pytest.raises(CallError, match="120 tokens a minute") as caught:
            client.embed(["abcdefg"] * 2, timeout_s=TIMEOUT_S)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s == pytest.approx((14 - 13) / 2)
        client.embed("abc", timeout_s=TIMEOUT_S)
        assert running.next_record("RESOURCE_EXHAUSTED").caller == "limited"

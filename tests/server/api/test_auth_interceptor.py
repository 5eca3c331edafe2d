"""API keys on a real server: who is let in, how much, and what is told of it."""

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.auth.key_file import add_key, digest, revoke_key
from quill.server.client.access import Access
from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.authority import Authority, trusting, write
from tests.server.running import SERVING, Running, health_of, running_server
from tests.server.scripted_session import TIMEOUT_S

NEVER = Retries(max_retries=0)


@dataclass(frozen=True)
class Keys:
    path: Path
    alice: str
    bob: str


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys.json"
    return Keys(path, add_key(path, "alice"), add_key(path, "bob"))


@pytest.fixture
def running(keys: Keys) -> Iterator[Running]:
    with running_server(api_keys=keys.path, metrics_port=0) as server:
        yield server


def ask(running: Running, secret: str | None) -> str:
    with Client(running.address, NEVER, access=Access(api_key=secret)) as client:
        answer = client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
        return answer.sequences[0].text


def refusal(running: Running, secret: str | None) -> CallError:
    with pytest.raises(CallError) as caught:
        ask(running, secret)
    return caught.value


def reflect(running: Running, secret: str | None) -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(running.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        metadata = Access(api_key=secret).metadata
        replies = stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S, metadata=metadata)
        return [each.name for each in next(replies).list_services_response.service]


def read_metrics(running: Running, secret: str | None = None) -> str:
    url = f"http://127.0.0.1:{running.server.metrics_port}/metrics"
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
        text: str = reply.read().decode()
        return text


def test_only_good_keys_are_let_in(running: Running, keys: Keys) -> None:
    assert ask(running, keys.alice) == "de"
    assert running.next_record("OK").caller == "alice"
    for wrong in (None, "wrong", digest(keys.alice)):
        assert refusal(running, wrong).code is grpc.StatusCode.UNAUTHENTICATED
        assert running.next_record("UNAUTHENTICATED").method == "Generate"


def test_revoked_key_is_refused_from_the_next_call_on(running: Running, keys: Keys) -> None:
    running.session.hold()
    with Client(running.address, NEVER, access=Access(api_key=keys.alice)) as client:
        chunks = client.stream("abc", max_new_tokens=5, timeout_s=TIMEOUT_S)
        running.session.let_go(1)
        text = next(chunks).text
        revoke_key(keys.path, "alice")
        assert refusal(running, keys.alice).code is grpc.StatusCode.PERMISSION_DENIED
        running.session.let_go()
        assert text + "".join(chunk.text for chunk in chunks) == "defgh"
    assert ask(running, keys.bob) == "de"
    assert ask(running, add_key(keys.path, "carol")) == "de"


def test_health_is_open_and_the_rest_is_not(running: Running, keys: Keys) -> None:
    assert health_of(running) == SERVING
    assert "quill.v1.TextGeneration" in reflect(running, keys.alice)
    with pytest.raises(grpc.RpcError) as caught:
        reflect(running, None)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "quill_max_num_seqs" in read_metrics(running, keys.alice)
    for wrong in (None, "wrong"):
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            read_metrics(running, wrong)
        refused.value.close()


def test_reflection_and_metrics_follow_their_switches(keys: Keys) -> None:
    allowed = ("reflection", "metrics")
    with running_server(
        api_keys=keys.path, metrics_port=0, allow_unauthenticated=allowed
    ) as running:
        assert "quill.v1.TextGeneration" in reflect(running, None)
        assert "quill_max_num_seqs" in read_metrics(running)
        assert refusal(running, None).code is grpc.StatusCode.UNAUTHENTICATED


def test_rate_is_refused_with_a_delay_and_others_go_on(running: Running, keys: Keys) -> None:
    slow = add_key(keys.path, "slow", requests_per_minute=6)
    assert ask(running, slow) == "de"
    error = refusal(running, slow)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after_s == pytest.approx(10, abs=1)
    assert ask(running, keys.alice) == "de"


def test_calls_at_once_are_limited_and_end_with_their_client(running: Running, keys: Keys) -> None:
    narrow = add_key(keys.path, "narrow", max_concurrent=1)
    running.session.hold()
    with Client(running.address, NEVER, access=Access(api_key=narrow)) as client:
        chunks = client.stream("abc", timeout_s=TIMEOUT_S)
        running.session.let_go(1)
        next(chunks)
        error = refusal(running, narrow)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_after_s is not None
        chunks.close()
        running.session.let_go()
        running.next_record("CANCELLED")
        assert ask(running, narrow) == "de"


def limited(running: Running, keys: Keys, **limits: int) -> Client:
    secret = add_key(keys.path, "limited", **limits)
    return Client(running.address, NEVER, access=Access(api_key=secret))


def delay_of(client: Client) -> float | None:
    """Of a call that is refused for now."""
    with pytest.raises(CallError) as caught:
        client.generate("a", max_new_tokens=1, timeout_s=TIMEOUT_S)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return caught.value.retry_after_s


def test_tokens_a_minute_are_prompts_and_answers_and_others_go_on(
    running: Running, keys: Keys
) -> None:
    with limited(running, keys, tokens_per_minute=120) as client:  # 20 at once, then 2 a second
        client.generate("abc", max_new_tokens=5, num_sequences=2, timeout_s=TIMEOUT_S)
        with pytest.raises(CallError, match="120 tokens a minute") as caught:
            client.generate("x" * 17, max_new_tokens=1, timeout_s=TIMEOUT_S)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s == pytest.approx((17 - (20 - 13)) / 2, abs=1)
        chunks = client.stream("abc", max_new_tokens=100, timeout_s=TIMEOUT_S)
        assert len("".join(chunk.text for chunk in chunks)) == 100, "what has begun is finished"
        with pytest.raises(CallError) as caught:
            client.score("abc", timeout_s=TIMEOUT_S)
        assert caught.value.retry_after_s == pytest.approx((3 - (20 - 13 - 103)) / 2, abs=3)
        assert running.next_record("RESOURCE_EXHAUSTED").caller == "limited"
    assert ask(running, keys.alice) == "de"


def test_tokens_of_the_tokenizer_count_as_those_of_prompts(running: Running, keys: Keys) -> None:
    with limited(running, keys, tokens_per_minute=120) as client:  # 20 at once, then 2 a second
        client.tokenize("x" * 40, timeout_s=TIMEOUT_S)
        for call in (
            lambda: client.tokenize("a", timeout_s=TIMEOUT_S),
            lambda: client.detokenize([5], timeout_s=TIMEOUT_S),
            lambda: client.generate("a", max_new_tokens=1, timeout_s=TIMEOUT_S),
        ):
            with pytest.raises(CallError, match="120 tokens a minute") as caught:
                call()
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.retry_after_s == pytest.approx(10, abs=3)


def test_answer_counts_while_it_comes_and_after_its_client_left(
    running: Running, keys: Keys
) -> None:
    running.session.hold()
    with limited(running, keys, tokens_per_minute=60) as client:  # 10 at once, then 1 a second
        chunks = client.stream("abcdefgh", max_new_tokens=50, timeout_s=TIMEOUT_S)
        running.session.let_go(31)
        num_tokens = 0
        while num_tokens < 30:
            num_tokens += len(next(chunks).token_ids)
        owed = num_tokens + 8 - 10
        assert delay_of(client) == pytest.approx(1 + owed, abs=3)
        chunks.close()
        running.next_record("CANCELLED")
        running.session.let_go()
        assert delay_of(client) == pytest.approx(1 + owed, abs=3)


def test_request_that_the_queue_refuses_costs_no_tokens(keys: Keys) -> None:
    with running_server(max_num_seqs=1, max_waiting=1, api_keys=keys.path) as running:
        running.session.hold()
        request = pb.GenerateRequest(prompt="abc", max_new_tokens=1)
        metadata = Access(api_key=keys.alice).metadata
        with (
            limited(running, keys, tokens_per_minute=60) as client,
            grpc.insecure_channel(running.address) as channel,
        ):
            stub: Any = pb_grpc.TextGenerationStub(channel)
            waiting = stub.Generate.future(request, metadata=metadata, timeout=TIMEOUT_S)
            running.wait_for_waiting(1)
            for _ in range(3):
                with pytest.raises(CallError, match="waiting, which is the limit"):
                    client.generate("abcdefghi", max_new_tokens=1, timeout_s=TIMEOUT_S)
            running.session.let_go()
            assert waiting.result().sequences[0].text == "d"
            answer = client.generate("abcdefghi", max_new_tokens=1, timeout_s=TIMEOUT_S)
            assert answer.sequences[0].text == "j"


def test_longest_prompt_of_a_key_is_held_to_in_every_kind_of_call(
    running: Running, keys: Keys
) -> None:
    rule = "has 6 tokens; at most 5 are allowed with this API key"
    with limited(running, keys, max_prompt_tokens=5) as client:
        answer = client.generate("abcde", max_new_tokens=2, timeout_s=TIMEOUT_S)
        assert answer.sequences[0].text == "fg"
        client.score("abcde", timeout_s=TIMEOUT_S)
        with pytest.raises(CallError, match=f"prompt {rule}") as caught:
            client.generate("abcdef", max_new_tokens=2, timeout_s=TIMEOUT_S)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.field == "prompt"
        assert running.next_record("INVALID_ARGUMENT").bad_field == "prompt"
        with pytest.raises(CallError, match=f"prompt_ids {rule}"):
            list(client.stream([1, 2, 3, 4, 5, 6], max_new_tokens=2, timeout_s=TIMEOUT_S))
        with pytest.raises(CallError, match=f"text {rule}"):
            client.score("abcdef", timeout_s=TIMEOUT_S)
        with pytest.raises(CallError, match=f"text {rule}"):
            client.tokenize("abcdef", timeout_s=TIMEOUT_S)
        with pytest.raises(CallError, match=r"messages has \d+ tokens; at most 5 are"):
            client.generate(
                [{"role": "user", "content": "abcdef"}], max_new_tokens=2, timeout_s=TIMEOUT_S
            )
    with Client(running.address, NEVER, access=Access(api_key=keys.alice)) as client:
        client.generate("abcdef", max_new_tokens=2, timeout_s=TIMEOUT_S)


def test_names_that_strangers_make_up_dont_reach_the_metrics(running: Running, keys: Keys) -> None:
    with grpc.insecure_channel(running.address) as channel:
        for method in ("/quill.v1.TextGeneration/Invented", "/invented.Service/Call"):
            call: Any = channel.unary_unary(method)
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    running.next_record("UNAUTHENTICATED")
    text = read_metrics(running, keys.alice)
    assert 'method="other",outcome="UNAUTHENTICATED"' in text
    assert "nvented" not in text


def test_keys_never_reach_logs_metrics_or_errors(
    running: Running, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        ask(running, keys.alice)
        wrong = refusal(running, keys.bob[:-1])
        revoke_key(keys.path, "bob")
        revoked = refusal(running, keys.bob)
        told = [read_metrics(running, keys.alice), str(wrong), str(revoked)]
    told += [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert any("'caller': 'alice'" in each for each in told)
    for secret in (keys.alice, keys.bob):
        for each in told:
            assert secret[:-1] not in each
            assert secret[6:20] not in each
            assert digest(secret) not in each


def test_without_keys_a_certificate_says_who_calls(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    files = write(tmp_path, ours.sign("server"), client_ca=theirs.cert)
    with running_server(tls=files) as running:
        access = trusting(ours, theirs.sign("friend"))
        with Client(running.address, NEVER, access=access) as client:
            client.model(timeout_s=TIMEOUT_S)
        assert "localhost" in running.next_record("OK").caller


def test_flood_of_one_certificate_leaves_half_of_the_queue_to_others(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    files = write(tmp_path, ours.sign("server"), client_ca=theirs.cert)
    request = pb.GenerateRequest(prompt="abc", max_new_tokens=2)
    with running_server(max_num_seqs=1, max_waiting=8, tls=files) as running:
        running.session.hold()
        credentials = trusting(ours, theirs.sign("friend")).credentials(running.address)
        assert credentials is not None
        with grpc.secure_channel(running.address, credentials) as channel:
            stub: Any = pb_grpc.TextGenerationStub(channel)
            calls = [stub.Generate.future(request, timeout=TIMEOUT_S) for _ in range(12)]
            record = running.next_record("RESOURCE_EXHAUSTED")
            assert record.rejection == "key_queue_share"
            assert "localhost" in record.caller
            for call in calls:
                call.cancel()


def cached_tokens(running: Running, secret: str) -> int:
    with Client(running.address, NEVER, access=Access(api_key=secret)) as client:
        answer = client.generate("x" * 100, max_new_tokens=1, timeout_s=TIMEOUT_S)
        return answer.usage.cached_tokens


def test_prompts_of_one_key_are_not_found_by_another(running: Running, keys: Keys) -> None:
    assert [cached_tokens(running, keys.alice) for _ in range(2)] == [0, 96]
    assert [cached_tokens(running, keys.bob) for _ in range(2)] == [0, 96]


def test_prompts_are_shared_on_purpose(keys: Keys) -> None:
    with running_server(api_keys=keys.path, share_prefix_cache=True) as running:
        assert cached_tokens(running, keys.alice) == 0
        assert cached_tokens(running, keys.bob) == 96


def test_flood_of_one_key_leaves_room_and_a_turn_for_another(keys: Keys) -> None:
    def flood() -> None:
        calls.append(stub.Generate.future(request, metadata=metadata, timeout=TIMEOUT_S))

    request = pb.GenerateRequest(prompt="abc", max_new_tokens=2)
    metadata = Access(api_key=keys.alice).metadata
    calls: list[Any] = []
    with running_server(max_num_seqs=1, max_waiting=8, api_keys=keys.path) as running:
        running.session.hold()
        with grpc.insecure_channel(running.address) as channel:
            stub: Any = pb_grpc.TextGenerationStub(channel)
            for _ in range(12):
                flood()
            for _ in range(12 - 4):  # four get in: half of the queue
                running.next_record("RESOURCE_EXHAUSTED")
            quick = stub.Generate.future(
                request, metadata=Access(api_key=keys.bob).metadata, timeout=TIMEOUT_S
            )
            running.wait_for_waiting(5)
            running.session.let_go()
            assert quick.result().sequences[0].text == "de"
            owners = [running.next_record("OK").caller for _ in range(5)]
            assert owners.index("bob") <= 2, "behind the one that ran and at most one more"

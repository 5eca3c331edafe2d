"""A server with everything but a model: real sockets, real threads, a session that recites."""

import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quill.__main__ import main
from quill.protos import generation_pb2 as pb
from quill.server.auth.key_file import add_key
from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from quill.server.serve.command_line import http_url, line_to_type
from quill.server.settings import Settings
from tests.server.authority import Authority, write
from tests.server.running import SERVING, Running, health_of, running_server
from tests.server.scripted_session import END, TIMEOUT_S, token_of

NEVER = Retries(max_retries=0)
SERVICE = "quill.v1.TextGeneration"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server() as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    with Client(running.address, NEVER) as client:
        yield client


def generate(client: Client, prompt: Any = "abc", **options: Any) -> pb.GenerateResponse:
    return client.generate(prompt, timeout_s=TIMEOUT_S, **options)


def refusal(client: Client, prompt: Any = "abc", **options: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        generate(client, prompt, **options)
    return caught.value


def test_answer_has_text_tokens_and_an_account(client: Client) -> None:
    answer = generate(client, max_new_tokens=4, seed=5)
    (sequence,) = answer.sequences
    assert sequence.text == "defg"
    assert list(sequence.token_ids) == [token_of(byte) for byte in b"defg"]
    assert sequence.finish_reason == pb.FINISH_REASON_LENGTH
    assert (answer.seed, sequence.seed) == (5, 5)
    assert (answer.usage.prompt_tokens, answer.usage.generated_tokens) == (3, 4)
    assert 0 < answer.timings.queue_ms <= answer.timings.first_token_ms <= answer.timings.total_ms
    assert answer.request_id


def test_stream_says_what_the_answer_says_and_ends_once(client: Client) -> None:
    chunks = list(client.stream("abc", max_new_tokens=9, timeout_s=TIMEOUT_S))
    assert "".join(chunk.text for chunk in chunks) == "defghijkl"
    reasons = [chunk.finish_reason for chunk in chunks]
    assert reasons.count(pb.FINISH_REASON_LENGTH) == 1
    assert reasons[-1] == pb.FINISH_REASON_LENGTH
    assert chunks[-1].usage.generated_tokens == 9


def test_stream_never_sends_half_a_character(client: Client) -> None:
    chunks = list(client.stream("é", max_new_tokens=8, timeout_s=TIMEOUT_S))
    assert all(set(chunk.text) <= {"é"} for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == "éééé"


def test_character_cut_off_by_the_length_shows_as_a_replacement(client: Client) -> None:
    assert generate(client, "é", max_new_tokens=3).sequences[0].text == "é\ufffd"


def test_end_of_text_is_a_token_and_not_text(client: Client) -> None:
    (sequence,) = generate(client, "X").sequences
    assert sequence.text == "YZ"
    assert sequence.token_ids[-1] == END
    assert sequence.finish_reason == pb.FINISH_REASON_EOS


def test_stop_string_ends_the_answer_and_is_not_part_of_it(client: Client) -> None:
    answer = generate(client, stop=["hi"], max_new_tokens=100)
    (sequence,) = answer.sequences
    assert sequence.text == "defg"
    assert list(sequence.token_ids) == [token_of(byte) for byte in b"defghi"]
    assert sequence.finish_reason == pb.FINISH_REASON_STOP
    assert answer.usage.generated_tokens == 6


def test_stream_shows_nothing_of_a_stop_string(client: Client) -> None:
    chunks = list(client.stream("abc", stop=["hij"], max_new_tokens=100, timeout_s=TIMEOUT_S))
    assert "".join(chunk.text for chunk in chunks) == "defg"
    assert all("h" not in chunk.text for chunk in chunks)


def test_stop_token_is_the_last_token_and_not_text(client: Client) -> None:
    (sequence,) = generate(client, stop_token_ids=[token_of(ord("f"))]).sequences
    assert sequence.text == "de"
    assert sequence.token_ids[-1] == token_of(ord("f"))
    assert sequence.finish_reason == pb.FINISH_REASON_STOP


def test_several_sequences_end_each_by_itself(client: Client) -> None:
    chunks = list(client.stream("abc", num_sequences=3, max_new_tokens=5, timeout_s=TIMEOUT_S))
    for number in range(3):
        own = [chunk for chunk in chunks if chunk.sequence == number]
        assert "".join(chunk.text for chunk in own) == "defgh"
        assert [chunk.finish_reason for chunk in own].count(pb.FINISH_REASON_LENGTH) == 1
    assert len({chunk.seed for chunk in chunks if chunk.finish_reason}) == 3


def test_echo_puts_the_prompt_before_the_answer(client: Client) -> None:
    (sequence,) = generate(client, echo=True, max_new_tokens=2, logprobs=1).sequences
    assert sequence.text == "abcde"
    assert len(sequence.token_ids) == len(sequence.logprobs) == 5
    assert not sequence.logprobs[0].HasField("logprob")
    assert [each.text for each in sequence.logprobs] == list("abcde")
    assert all(len(each.top) == 1 for each in sequence.logprobs[1:])


def test_echo_joins_a_character_that_the_prompt_begins_and_the_answer_ends(client: Client) -> None:
    half = [token_of(ord("a")), token_of(0xC3)]
    (sequence,) = generate(client, half, echo=True, max_new_tokens=1).sequences
    assert sequence.text == "aé"


def test_prompt_logprobs_come_with_the_first_chunk_only(client: Client) -> None:
    chunks = list(client.stream("abc", prompt_logprobs=2, max_new_tokens=3, timeout_s=TIMEOUT_S))
    assert [len(chunk.prompt_logprobs) for chunk in chunks] == [3] + [0] * (len(chunks) - 1)
    assert chunks[0].prompt_logprobs[1].logprob == pytest.approx(0, abs=1e-3)


def test_conversation_is_answered(client: Client) -> None:
    answer = generate(client, [{"role": "user", "content": "hi"}], max_new_tokens=3)
    assert answer.sequences[0].text == "lmn"


def test_score_is_the_sum_of_the_logprobs_after_the_first(client: Client) -> None:
    score = client.score("abcd", timeout_s=TIMEOUT_S)
    assert score.log_likelihood == pytest.approx(0, abs=1e-3)
    assert [token.text for token in score.tokens] == list("abcd")
    assert client.score("abd", timeout_s=TIMEOUT_S).log_likelihood < -15


def test_text_goes_to_tokens_and_back(client: Client) -> None:
    ids = client.tokenize("Größe 👩‍👩‍👧", timeout_s=TIMEOUT_S)
    assert client.detokenize(ids, timeout_s=TIMEOUT_S) == "Größe 👩‍👩‍👧"
    with pytest.raises(CallError) as caught:
        client.detokenize([300], timeout_s=TIMEOUT_S)
    assert caught.value.field == "token_ids"


def test_model_tells_its_limits(client: Client) -> None:
    model = client.model(timeout_s=TIMEOUT_S)
    assert (model.name, model.family, model.context) == ("reciter", pb.FAMILY_CAUSAL, 200)
    assert (model.max_num_seqs, model.max_num_sequences, model.max_waiting) == (4, 4, 4)
    assert dict(model.defaults) == {"temperature": 0.0}


def test_reflection_and_health_name_the_service(running: Running) -> None:
    assert health_of(running) == health_of(running, "") == SERVING
    with grpc.insecure_channel(running.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([asked]), timeout=TIMEOUT_S)
    assert SERVICE in {service.name for service in reply.list_services_response.service}


def test_refusal_names_the_field_and_others_are_served(client: Client) -> None:
    error = refusal(client, temperature=float("nan"))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "temperature")
    assert generate(client, max_new_tokens=1).sequences[0].text == "d"


def raw_call(running: Running, message: bytes) -> grpc.StatusCode:
    """Sends bytes that no client of ours would."""
    with grpc.insecure_channel(running.address) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=TIMEOUT_S)
    code: grpc.StatusCode = caught.value.code()
    return code


def test_text_that_is_no_utf8_is_refused(running: Running, client: Client) -> None:
    running.records.queue.clear()  # of the tests before
    assert raw_call(running, b"\x0a\x02\xff\xfe") == grpc.StatusCode.INVALID_ARGUMENT
    assert running.next_record("INVALID_ARGUMENT").method == "Generate"
    assert generate(client, max_new_tokens=1).sequences[0].text == "d"


def test_message_beyond_the_limit_is_refused(running: Running, client: Client) -> None:
    message = pb.GenerateRequest(prompt="x" * (100 * 2**20)).SerializeToString()
    assert raw_call(running, message) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert generate(client, max_new_tokens=1).sequences[0].text == "d"


def test_client_that_connects_and_says_nothing_disturbs_nobody(
    running: Running, client: Client
) -> None:
    with socket.create_connection(("127.0.0.1", running.server.port), TIMEOUT_S):
        assert generate(client, max_new_tokens=1).sequences[0].text == "d"


def test_deadline_already_past_is_refused(running: Running, client: Client) -> None:
    running.session.hold()  # gRPC notices a little late: an answer may come before
    try:
        with pytest.raises(CallError) as caught:
            client.generate("abc", timeout_s=0)
    finally:
        running.session.let_go()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert generate(client, max_new_tokens=1).sequences[0].text == "d"


OURS, THEIRS = Authority("ours"), Authority("theirs")


def protection(directory: Path, mutual: bool, keys: bool) -> dict[str, Any]:
    """The server's settings; what the client needs is in the directory, by the line's names."""
    friend, settings = THEIRS.sign("friend"), dict[str, Any]()
    client_ca = THEIRS.cert if mutual else None
    settings["tls"] = write(directory, OURS.sign("server"), client_ca=client_ca)
    (directory / "CA.pem").write_bytes(OURS.cert)
    (directory / "CLIENT.pem").write_bytes(friend.cert)
    (directory / "CLIENT.key").write_bytes(friend.key)
    if keys:
        settings["api_keys"] = directory / "keys.json"
        (directory / "FILE").write_text(add_key(settings["api_keys"], "alice"))
    return settings


def printed_line(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return shlex.split(capsys.readouterr().out.splitlines()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    ("mutual", "keys"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_printed_line_gets_an_answer(
    host: str,
    mutual: bool,
    keys: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with running_server(host=host, **protection(tmp_path, mutual, keys)) as running:
        command, *arguments = printed_line(capsys)
        assert command == "quill"
        assert arguments[2] == f"127.0.0.1:{running.server.port}"
        assert ("--cert" in arguments, "--api-key-file" in arguments) == (mutual, keys)
        assert main([*arguments, "--max-new-tokens", "2"]) == 0


def test_server_on_all_of_ipv6_is_called_on_its_loopback() -> None:
    assert "--address '[::1]:5' " in line_to_type(Settings(host="::"), 5, "causal")


@pytest.mark.parametrize(("host", "found"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_metrics_of_a_server_on_all_addresses_are_where_they_can_be_read(
    host: str, found: str
) -> None:
    assert http_url(Settings(host=host), 5, "/metrics") == f"http://{found}:5/metrics"

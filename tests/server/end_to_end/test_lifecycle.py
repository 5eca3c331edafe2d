"""Starting, stopping, overload, clients that leave: each leaves the server serving others."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from quill.server.errors import StartError
from quill.server.http.connection import bind
from quill.server.loading.instance import ModelInstance
from quill.server.serve.server import Server
from quill.server.settings import Settings
from tests.server.running import (
    NOT_SERVING,
    SERVICE,
    SERVING,
    Running,
    health_of,
    running_server,
)
from tests.server.scripted_session import TIMEOUT_S

NEVER = Retries(max_retries=0)


class Caller:
    """A request in the background. `answer` waits for it."""

    def __init__(self, running: Running, **options: Any) -> None:
        # Without the probe windows stay small, so that a reader that sleeps is soon full.
        quiet = (("grpc.http2.bdp_probe", 0),)
        self._channel = grpc.insecure_channel(running.address, options=quiet)
        stub = pb_grpc.TextGenerationStub(self._channel)
        self._call: Any = stub.GenerateStream(
            pb.GenerateRequest(**{"prompt": "abc", "max_new_tokens": 150, **options}),
            timeout=TIMEOUT_S,
        )

    def text(self) -> str:
        return "".join(chunk.text for chunk in self._call)

    def first(self) -> pb.GenerateChunk:
        chunk: pb.GenerateChunk = next(self._call)
        return chunk

    def error(self) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError):
            self.text()
        code: grpc.StatusCode = self._call.code()
        return code

    def cancel(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()


def watch_health(running: Running) -> Iterator[int]:
    with grpc.insecure_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        for reply in stub.Watch(request, timeout=TIMEOUT_S):
            yield int(reply.status)


def ask(running: Running, **options: Any) -> str:
    with Client(running.address, NEVER) as client:
        answer = client.generate("abc", timeout_s=TIMEOUT_S, **{"max_new_tokens": 2, **options})
        return answer.sequences[0].text


def start_one(running: Running, **options: Any) -> Caller:
    """A request whose first step has run; the next one is held back."""
    running.session.hold()
    caller = Caller(running, **options)
    running.session.let_go(1)
    caller.first()
    return caller


def test_while_loading_health_is_not_serving_and_calls_are_unavailable() -> None:
    with running_server(wait=False) as running:
        assert health_of(running) == NOT_SERVING
        with pytest.raises(CallError, match="loading") as caught:
            ask(running)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        running.loading.set()
        running.call(running.server.ready.wait())
        assert health_of(running) == SERVING
        assert ask(running) == "de"


class NoLoader:
    def load(self) -> ModelInstance:
        pytest.fail("nothing is loaded")

    reload = load


def test_port_that_is_taken_is_an_error_that_says_what_to_do() -> None:
    async def second(settings: Settings) -> None:
        await Server(NoLoader(), settings).run()

    with running_server(metrics_port=0) as running:
        with pytest.raises(StartError, match="--port"):
            asyncio.run(second(Settings(port=running.server.port)))
        with pytest.raises(StartError, match="--metrics-port"):
            bind("127.0.0.1", running.server.metrics_port or 0, "--metrics-port")


def test_server_that_is_stopped_while_it_is_loading_does_not_wait_for_that() -> None:
    with running_server(wait=False) as running:
        running.stop()
        running.join()
        assert not running.loading.is_set()


def test_drain_finishes_running_requests_and_rejects_new_ones() -> None:
    with running_server() as running:
        caller = start_one(running, max_new_tokens=20)
        states = watch_health(running)
        assert next(states) == SERVING
        running.stop()
        assert next(states) == NOT_SERVING
        states.close()  # type: ignore[attr-defined]
        with pytest.raises(CallError, match="stopping") as caught:
            ask(running)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        running.session.let_go()
        assert caller.text() == "efghijklmnopqrstuvw"
        running.join()
        caller.close()


@pytest.mark.parametrize(("grace_s", "num_signals"), [(0.0, 1), (1000.0, 2)])
def test_what_does_not_end_in_time_ends_with_unavailable(grace_s: float, num_signals: int) -> None:
    with running_server(drain_timeout_s=grace_s) as running:
        caller = start_one(running)
        for _ in range(num_signals):
            running.stop()
        running.call(running.server.closing.wait())
        running.session.let_go()
        assert caller.error() is grpc.StatusCode.UNAVAILABLE
        running.join()
        caller.close()


def test_full_queue_rejects_with_a_retry_delay() -> None:
    with running_server(max_num_seqs=1, max_waiting=1) as running:
        first = start_one(running, max_new_tokens=3)
        second = Caller(running, max_new_tokens=3)
        running.wait_for_waiting(1)
        with pytest.raises(CallError, match="waiting") as caught:
            ask(running)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 0.1
        running.session.let_go()
        assert (first.text(), second.text()) == ("ef", "def")
        first.close()
        second.close()


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_client_that_leaves_frees_its_sequence_by_the_next_step(
    num_steps: int, num_sequences: int
) -> None:
    with running_server(max_num_seqs=num_sequences) as running:
        running.session.hold()
        leaving = Caller(running, num_sequences=num_sequences, prompt="x" * 50)
        running.session.let_go(num_steps)
        running.session.wait_for_steps(num_steps)
        running.wait_for_requests(1)
        leaving.cancel()
        running.next_record("CANCELLED")
        running.session.let_go()
        assert ask(running) == "de"
        # The step that was under way, and the next request's own two.
        assert running.session.num_steps <= num_steps + 3
        leaving.close()


def test_client_that_leaves_the_queue_is_forgotten() -> None:
    with running_server(max_num_seqs=1) as running:
        first = start_one(running, max_new_tokens=3)
        leaving = Caller(running)
        running.wait_for_waiting(1)
        leaving.cancel()
        running.next_record("CANCELLED")
        running.session.let_go()
        assert first.text() == "ef"
        assert ask(running) == "de"
        assert running.session.num_steps == 5
        first.close()
        leaving.close()


def test_deadline_ends_a_call_and_frees_its_sequence() -> None:
    with running_server(max_num_seqs=1) as running:
        running.session.hold()
        with Client(running.address, NEVER) as client:
            client.model(timeout_s=TIMEOUT_S)  # so that the call finds a connection
            with pytest.raises(CallError) as caught:
                client.generate("abc", timeout_s=1.0)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            running.next_record("DEADLINE_EXCEEDED")
        running.session.let_go()
        assert ask(running) == "de"
        assert running.session.num_steps <= 4


def test_deadline_in_the_middle_of_a_stream_leaves_what_was_sent() -> None:
    with running_server(max_num_seqs=1) as running:
        running.session.hold()
        running.session.let_go(1)
        with Client(running.address, NEVER) as client:
            client.model(timeout_s=TIMEOUT_S)  # so that the call finds a connection
            chunks = client.stream("abc", timeout_s=2.0)
            assert next(chunks).text == "d"
            with pytest.raises(CallError) as caught:
                next(chunks)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert running.next_record("DEADLINE_EXCEEDED").method == "GenerateStream"
        running.session.let_go()
        assert ask(running) == "de"


def test_deadline_between_two_steps_ends_a_stream_with_its_reason() -> None:
    with running_server(max_num_seqs=1) as running, Client(running.address, NEVER) as client:
        running.session.hold()
        running.session.let_go(1)
        chunks = client.stream("abc", max_new_tokens=100, timeout_s=TIMEOUT_S)
        assert next(chunks).text == "d"
        running.ahead_s = 2 * TIMEOUT_S  # long before the client's own deadline
        running.session.let_go()
        last = list(chunks)[-1]
        assert last.finish_reason == pb.FINISH_REASON_DEADLINE
        assert running.next_record("OK").finish_reasons == ["deadline"]


def test_failing_step_fails_its_call_and_names_it() -> None:
    with running_server() as running:
        running.session.failures.append(RuntimeError("injected"))
        with pytest.raises(CallError) as caught:
            ask(running)
        assert caught.value.code is grpc.StatusCode.INTERNAL
        assert running.next_record("INTERNAL").request_id in str(caught.value)
        assert "injected" not in str(caught.value)
        assert ask(running) == "de"


def test_reader_that_never_reads_is_ended_and_others_are_served() -> None:
    with running_server(write_timeout_s=0.3) as running:
        # Far more than gRPC's windows hold.
        sleeping = Caller(running, num_sequences=4, logprobs=20, max_new_tokens=197)
        assert running.next_record("ABORTED").method == "GenerateStream"
        assert ask(running) == "de"
        sleeping.close()


def test_many_requests_at_once_all_get_their_own_answer() -> None:
    with running_server(max_num_seqs=4, max_waiting=64) as running:
        prompts = [chr(ord("a") + number) for number in range(20)]
        answers: dict[str, str] = {}

        def call(prompt: str) -> None:
            with Client(running.address, NEVER) as client:
                whole = client.generate(prompt, max_new_tokens=5, timeout_s=TIMEOUT_S)
                answers[prompt] = whole.sequences[0].text

        threads = [threading.Thread(target=call, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        alphabet = "abcdefghijklmnopqrstuvwxyz"
        assert answers == {
            prompt: alphabet[index + 1 : index + 6] for index, prompt in enumerate(prompts)
        }

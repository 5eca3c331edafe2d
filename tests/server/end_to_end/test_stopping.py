"""SIGTERM while many clients call: no call ends with CANCELLED, as if it had left by itself."""

import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.faults import Faults
from tests.server.process import (
    PATIENCE_S,
    PROMPT,
    ServerProcess,
    ask,
    reserved_port,
    server_process,
)
from tests.server.tiny_bundle import TinyBundle

NUM_CALLERS = 32
NUM_TOKENS = 5
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
PATIENT = Retries(max_retries=1000, first_s=0.05, max_s=0.2)


class Callers:
    """Callers that ask again and again, each over a connection of its own, until `call` is done."""

    def __init__(self, call: Callable[["Callers"], None]) -> None:
        self.ends: Counter[str] = Counter()  # every answer, and what each caller ended with
        self._is_busy = threading.Semaphore(0)
        self._threads = [threading.Thread(target=call, args=(self,)) for _ in range(NUM_CALLERS)]

    def note(self, end: str) -> None:
        self.ends[end] += 1
        self._is_busy.release()

    def start(self, num_answers: int) -> None:
        for thread in self._threads:
            thread.start()
        for _ in range(num_answers):
            assert self._is_busy.acquire(timeout=PATIENCE_S)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def call_until_it_fails(callers: Callers, address: str) -> None:
    request = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=PROMPT), max_new_tokens=NUM_TOKENS)
    with grpc.insecure_channel(address, options=OWN_CONNECTION) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        while True:
            try:
                list(stub.GenerateStream(request, timeout=PATIENCE_S))
            except grpc.RpcError as error:
                if "the server is loading or stopping" in (error.details() or ""):
                    callers.note("refused")
                    continue
                callers.note(error.code().name)
                return
            callers.note("OK")


def end(server: ServerProcess) -> None:
    server.signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("attempt", range(3))
def test_calls_that_had_not_begun_end_with_unavailable_and_are_logged(
    attempt: int, tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    faults, log_path = Faults(tmp_path), tmp_path / "log"
    with server_process(tiny_bundle.directory, log_path, environment=faults.environment) as server:
        callers = Callers(lambda callers: call_until_it_fails(callers, server.address))
        callers.start(2 * NUM_CALLERS)
        faults.start("slow")  # so that some callers come again while others are still answered
        end(server)
        callers.join()
        log = server.log
    # Some got an error message; the others' connection, or the port, was gone.
    assert set(callers.ends) - {"refused"} == {"OK", "UNAVAILABLE"}
    assert callers.ends["UNAVAILABLE"] == NUM_CALLERS
    assert log.count("outcome=OK") >= callers.ends["OK"]
    assert log.count("outcome=UNAVAILABLE") >= callers.ends["refused"] > 0
    assert "outcome=CANCELLED" not in log
    assert "Traceback" not in log
    assert log.splitlines()[-1].endswith("stopped")


def test_clients_go_on_with_the_next_server(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    stopped = threading.Event()

    def call(callers: Callers) -> None:
        with Client(server.address, PATIENT) as client:
            last = False
            while not last:
                last = stopped.is_set()  # one more answer, by the next server
                answer = client.generate(
                    PROMPT, seed=3, max_new_tokens=NUM_TOKENS, timeout_s=PATIENCE_S
                )
                callers.note(str(list(answer.sequences[0].token_ids)))

    with reserved_port() as port:
        with server_process(tiny_bundle.directory, tmp_path / "log", port=port) as server:
            expected = ask(server, seed=3, max_new_tokens=NUM_TOKENS)
            callers = Callers(call)
            callers.start(2 * NUM_CALLERS)
            end(server)
        stopped.set()
        with server_process(tiny_bundle.directory, tmp_path / "next", port=port):
            callers.join()
    assert set(callers.ends) == {str(expected)}

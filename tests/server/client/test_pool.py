"""The endpoint pool: several servers behind one address, for both clients."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2 as grpc_health

from quill.protos import generation_pb2 as pb
from quill.protos import health_pb2
from quill.server.auth.key_file import add_key
from quill.server.balancing_headers import TELL_LOAD, prefix_key, read_load
from quill.server.client import async_pool, primitives, sync_pool
from quill.server.client.access import Access, AccessError
from quill.server.client.async_client import AsyncClient
from quill.server.client.balancer import Ring, ServerState
from quill.server.client.errors import CallError
from quill.server.client.pool_state import is_serving, make_stub, read_watch_end
from quill.server.client.requests import make_request
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.authority import Authority, write
from tests.server.client.conftest import MakeClient
from tests.server.process import wait_until
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

NEVER = Retries(max_retries=0)
NAME = "quill.example:50051"


@pytest.fixture(autouse=True)
def first_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call waits for the status of every server, also on a machine that is busy."""
    set_first_status(monkeypatch, TIMEOUT_S)


def set_first_status(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for pool in (sync_pool, async_pool):
        monkeypatch.setattr(pool, "FIRST_STATUS_S", seconds)


@contextmanager
def several(number: int) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_server(max_waiting=8)) for _ in range(number)]


def address_of(servers: list[Running]) -> str:
    return "quill://" + ",".join(each.address for each in servers)


def begun(client: Client | AsyncClient) -> dict[str, int]:
    return {each.address: each.num_started for each in client.servers()}


def ask(client: Client, prompt: str) -> str:
    return client.generate(prompt, max_new_tokens=2, timeout_s=TIMEOUT_S).sequences[0].text


def prompts_of(home: Running, servers: list[Running]) -> Iterator[str]:
    """Prompts whose home this server is: ports are random, and so is the home of each prompt."""
    ring = Ring(each.address for each in servers)
    for prompt in (f"{number} abc" for number in range(1000)):
        key = prefix_key(make_request(prompt, {}))
        if key is not None and next(ring.order(key)) == home.address:
            yield prompt


def home_of(client: Client, prompt: str) -> str:
    before = begun(client)
    ask(client, prompt)
    (home,) = (each for each, number in begun(client).items() if number > before[each])
    return home


def state_of(client: Client, address: str) -> ServerState:
    (state,) = (each for each in client.servers() if each.address == address)
    return state


def num_outstanding(client: Client) -> list[int]:
    return [each.num_outstanding for each in client.servers()]


def test_requests_with_a_shared_prefix_go_to_one_server(
    make_client: MakeClient,
) -> None:
    with several(3) as servers, make_client(address_of(servers), NEVER) as client:
        for each in servers:
            first, second, *_ = prompts_of(each, servers)
            assert [home_of(client, prompt) for prompt in (first, second, first)] == (
                3 * [each.address]
            )
        assert client.model().name == "reciter"
        assert all(not each.num_outstanding for each in client.servers())


def test_loaded_server_gets_no_more_calls(make_client: MakeClient) -> None:
    with several(3) as servers, make_client(address_of(servers), NEVER) as client:
        home = home_of(client, "abc")
        for each in servers:
            each.session.hold()
        with ThreadPoolExecutor(6) as threads:
            running = [threads.submit(ask, client, "abc") for _ in range(6)]
            wait_until(lambda: sum(num_outstanding(client)) == 6, "all have been asked")
            assert sorted(num_outstanding(client)) == [0, 1, 5]
            assert state_of(client, home).num_outstanding == 5
            for each in servers:
                each.session.let_go()
            assert [each.result(TIMEOUT_S) for each in running] == 6 * ["de"]
        assert sum(num_outstanding(client)) == 0
        assert home_of(client, "abc") == home


def test_server_reports_its_load_at_the_start_and_the_end_of_a_call() -> None:
    """The first before there is a token: a loaded server would tell too late."""
    with running_server() as running:
        running.session.hold()
        request = pb.GenerateRequest(prompt="abc", max_new_tokens=2)
        with grpc.insecure_channel(running.address) as channel:
            stub = make_stub(channel)
            asking = {"timeout": TIMEOUT_S, "metadata": TELL_LOAD}
            silent = stub.GenerateStream(request, timeout=TIMEOUT_S)
            running.wait_for_requests(1)
            calls = [stub.GenerateStream(request, **asking) for _ in range(2)]
            assert sorted(read_load(each.initial_metadata()) or 0 for each in calls) == [2, 3]
            whole = stub.Generate(request, **asking)
            assert read_load(whole.initial_metadata()) == 4
            running.session.let_go()
            assert ["".join(chunk.text for chunk in each) for each in calls] == ["de", "de"]
            assert [answer.sequences[0].text for answer in whole] == ["de"]
            assert "".join(chunk.text for chunk in silent) == "de"
            assert read_load(silent.initial_metadata()) is None, "nobody asked"
            assert read_load(silent.trailing_metadata()) is None
            told = [read_load(each.trailing_metadata()) for each in (*calls, whole)]
            assert set(told) <= {0, 1, 2, 3}, "those that were there when each ended"
            last = stub.Generate(request, **asking)
            assert read_load(last.initial_metadata()) == len(list(last)) == 1
            assert read_load(last.trailing_metadata()) == 0
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.GenerateStream(pb.GenerateRequest(), **asking))
            assert read_load(cast("Any", refused.value).initial_metadata()) is None


def test_load_of_other_clients_counts(make_client: MakeClient) -> None:
    with (
        running_server(max_waiting=40) as one,
        running_server(max_waiting=40) as other,
        make_client(address_of([one, other]), NEVER) as client,
        ThreadPoolExecutor(21) as threads,
    ):
        address = home_of(client, "abc")
        home = one if one.address == address else other
        home.session.hold()
        with make_client(address, NEVER) as rude:
            running = [threads.submit(ask, rude, "abc") for _ in range(20)]
            home.wait_for_requests(20)
            running.append(threads.submit(ask, client, "abc"))
            wait_until(lambda: state_of(client, address).num_others == 20, "it has told")
            assert home_of(client, "abc") != address
            home.session.let_go()
            assert {each.result(TIMEOUT_S) for each in running} == {"de"}
        assert state_of(client, address).num_others < 20
        home.wait_for_requests(0)
        with make_client(address_of([one, other]), NEVER) as new:
            assert home_of(new, "abc") == address


def test_draining_server_gets_no_new_calls(make_client: MakeClient) -> None:
    with several(2) as servers, make_client(address_of(servers), NEVER) as client:
        home = home_of(client, "abc")
        leaving = next(each for each in servers if each.address == home)
        leaving.session.hold()
        leaving.session.let_go(1)
        chunks = client.stream("abc", max_new_tokens=3, timeout_s=TIMEOUT_S)
        assert next(chunks).text == "d"
        leaving.stop()
        wait_until(lambda: not state_of(client, home).is_serving, "it is known to drain")
        assert home_of(client, "abc") != home
        leaving.session.let_go()
        assert "".join(chunk.text for chunk in chunks) == "ef"  # what runs is finished
        assert state_of(client, home).num_failed == 0


def test_first_call_goes_past_dead_and_unresponsive_servers(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_first_status(monkeypatch, 5.0)  # one of the three has none
    with running_server() as running, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"quill://127.0.0.1:1,127.0.0.1:{silent.getsockname()[1]},{running.address}"
        with make_client(address, NEVER) as client:
            assert {home_of(client, prompt) for prompt in "abcdefgh"} == {running.address}
            assert [each.is_serving for each in client.servers()].count(True) == 1


def test_first_call_waits_half_of_its_deadline_at_most_for_health(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_first_status(monkeypatch, 60.0)
    with running_server() as running, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"quill://127.0.0.1:{silent.getsockname()[1]},{running.address}"
        with make_client(address, NEVER) as client:
            answer = client.generate("abc", max_new_tokens=2, timeout_s=10.0)
            assert answer.sequences[0].text == "de"


def test_call_that_a_full_server_rejects_goes_elsewhere_at_once(make_client: MakeClient) -> None:
    """Full queues: the server says when to come back, and another has room now."""
    waits: list[float] = []
    with (
        running_server(max_num_seqs=1, max_waiting=1) as full,
        running_server() as other,
        make_client(full.address, NEVER) as rude,
        make_client(address_of([full, other]), sleep=waits.append) as client,
    ):
        full.session.hold()
        full.session.let_go(1)
        blocking = rude.stream("abc", max_new_tokens=50, timeout_s=TIMEOUT_S)
        next(blocking)
        waiting = threading.Thread(target=ask, args=(rude, "abc"))
        waiting.start()
        full.wait_for_waiting(1)
        first, second, *_ = prompts_of(full, [full, other])
        assert [ask(client, first), ask(client, second)] == ["de", "de"]
        assert set(waits) == {0.0}
        assert state_of(client, full.address).num_failed == 2
        assert state_of(client, full.address).is_serving
        blocking.close()
        full.session.let_go()
        waiting.join(TIMEOUT_S)


def test_no_server_that_answers_is_reported(make_client: MakeClient) -> None:
    with make_client(
        "quill://127.0.0.1:1,127.0.0.1:2", Retries(max_retries=5, first_s=0.001)
    ) as client:
        with pytest.raises(CallError, match="no server answers"):
            client.model()
        assert sum(each.num_started for each in client.servers()) == 6


def test_dns_name_is_resolved_again(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[str] = []

    def resolve(name: str) -> tuple[str, ...]:
        assert name == NAME
        if not known:
            raise OSError("no such name")
        return tuple(known)

    monkeypatch.setattr(primitives, "resolve", resolve)
    monkeypatch.setattr(sync_pool, "resolve", resolve)
    for module in (async_pool, sync_pool):
        monkeypatch.setattr(module, "RESOLVE_S", 0.01)
    set_first_status(monkeypatch, 0.5)
    with (
        several(2) as (first, second),
        make_client(f"quill+dns://{NAME}", NEVER) as client,
    ):
        with pytest.raises(
            CallError, match=r"known by the name quill\.example:50051: no such name"
        ):
            client.model()
        known.append(first.address)
        wait_until(lambda: any(each.is_serving for each in client.servers()), "one is found")
        assert home_of(client, "abc") == first.address
        known[:] = [second.address]
        wait_until(lambda: second.address in begun(client), "another has taken its place")
        assert home_of(client, "abc") == second.address


def test_dns_name_that_no_host_can_have_is_named(make_client: MakeClient) -> None:
    with (
        make_client("quill+dns://a..b:1", NEVER) as client,
        pytest.raises(CallError, match="label"),
    ):
        client.generate("a", timeout_s=TIMEOUT_S)


def test_dns_name_of_this_machine(make_client: MakeClient) -> None:
    with running_server() as running:
        address = f"quill+dns://localhost:{running.server.port}"
        with make_client(address) as client:
            assert ask(client, "abc") == "de"


@pytest.mark.parametrize("form", ["quill://127.0.0.1:{}", "quill+dns://localhost:{}"])
def test_certificates_and_api_key_work_in_a_pool(
    make_client: MakeClient, form: str, tmp_path: Path
) -> None:
    ours = Authority("ours")
    secret = add_key(tmp_path / "keys.json", "alice")
    files = write(tmp_path, ours.sign("server"))
    with running_server(tls=files, api_keys=tmp_path / "keys.json", metrics_port=0) as running:
        address = form.format(running.server.port)
        access = Access(ca=ours.cert, api_key=secret)
        with make_client(address, NEVER, access=access) as client:
            assert ask(client, "abc") == "de"
        for access, problem in (
            (Access(ca=ours.cert), "UNAUTHENTICATED"),
            (Access(ca=Authority("theirs").cert), "isn't trusted by the authority"),
        ):
            with (
                make_client(address, NEVER, access=access) as client,
                pytest.raises(CallError, match=problem),
            ):
                ask(client, "abc")


@pytest.mark.parametrize("scheme", ["", "quill://"])
def test_loopback_calls_bypass_the_proxy(
    make_client: MakeClient, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would see the API key, which goes to this machine in plaintext."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    with running_server() as running, make_client(scheme + running.address, NEVER) as client:
        assert ask(client, "abc") == "de"


def test_api_key_is_never_sent_in_plaintext(make_client: MakeClient) -> None:
    access = Access(api_key="secret")
    for address in ("quill://127.0.0.1:1,example.org:1", "quill+dns://example.org:1"):
        with pytest.raises(AccessError, match=r"on its way to example\.org"):
            make_client(address, access=access)


def test_health_service_has_grpcs_own_messages() -> None:
    states = grpc_health.HealthCheckResponse
    for status in (states.SERVING, states.NOT_SERVING, states.SERVICE_UNKNOWN, states.UNKNOWN):
        message = states(status=status).SerializeToString()
        response = health_pb2.HealthCheckResponse.FromString(message)
        assert is_serving(response) == (status == states.SERVING)
    assert health_pb2.HealthCheckRequest().SerializeToString() == b""


def test_watch_that_ends_means_death_unless_its_time_was_over() -> None:
    over = grpc.StatusCode.DEADLINE_EXCEEDED
    assert read_watch_end(over, had_status=True).is_serving is None
    assert read_watch_end(over, had_status=False).is_serving is False
    for code in (None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        assert read_watch_end(code, had_status=True).is_serving is False
    assert read_watch_end(grpc.StatusCode.UNIMPLEMENTED, had_status=False).is_serving


def test_server_without_a_health_service_is_called(make_client: MakeClient) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    address = f"quill://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with make_client(address, NEVER) as client:
            with pytest.raises(CallError, match="UNIMPLEMENTED"):
                client.model(timeout_s=TIMEOUT_S)
            assert [each.is_serving for each in client.servers()] == [True]
    finally:
        server.stop(None).wait(TIMEOUT_S)

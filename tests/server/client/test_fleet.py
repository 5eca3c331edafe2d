"""Several servers behind one address, for both clients."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.server.auth.key_file import add_key
from quill.server.client import fleet
from quill.server.client.access import Access, AccessError
from quill.server.client.async_client import AsyncClient
from quill.server.client.balancing.balancer import ServerState
from quill.server.client.call_error import CallError
from quill.server.client.fleet_state import make_stub
from quill.server.client.health import HEAR_S
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from quill.server.load_header import TELL_LOAD, read_load
from tests.server.authority import Authority, write
from tests.server.process import wait_until
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

NEVER = Retries(max_retries=0)


@contextmanager
def several(number: int) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_server(max_waiting=8)) for _ in range(number)]


def address_of(servers: list[Running]) -> str:
    return "quill://" + ",".join(each.address for each in servers)


def begun(client: Client | AsyncClient) -> dict[str, int]:
    return {each.address: each.num_begun for each in client.servers()}


def ask(client: Client, prompt: str) -> str:
    return client.generate(prompt, max_new_tokens=2, timeout_s=TIMEOUT_S).sequences[0].text


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


def test_texts_that_begin_alike_meet_one_server_and_others_are_spread() -> None:
    with several(3) as servers, Client(address_of(servers), NEVER) as client:
        homes = {prompt: home_of(client, prompt) for prompt in "abcdefghijklmnop"}
        assert set(homes.values()) == {each.address for each in servers}
        assert homes == {prompt: home_of(client, prompt) for prompt in homes}
        assert client.model().name == "reciter"
        assert all(not each.num_outstanding for each in client.servers())


def test_client_for_asyncio_sends_the_same_to_the_same() -> None:
    async def main(address: str) -> dict[str, int]:
        async with AsyncClient(address, NEVER) as client:
            for prompt in "abcdefgh":
                await client.generate(prompt, max_new_tokens=1, timeout_s=TIMEOUT_S)
            chunks = client.stream("i", max_new_tokens=3, timeout_s=TIMEOUT_S)
            assert "".join([chunk.text async for chunk in chunks]) == "jkl"
            return begun(client)

    with several(3) as servers:
        with Client(address_of(servers), NEVER) as client:
            for prompt in "abcdefghi":
                ask(client, prompt)
            expected = begun(client)
        assert asyncio.run(main(address_of(servers))) == expected


def test_loaded_server_is_spared() -> None:
    with several(3) as servers, Client(address_of(servers), NEVER) as client:
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


def test_server_tells_of_its_load_when_a_request_is_taken_in_and_when_it_ends() -> None:
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


def test_server_that_others_load_is_spared_by_both_clients() -> None:
    async def ask_in_asyncio(address: str) -> None:
        async with AsyncClient(address, NEVER) as client:
            first = asyncio.ensure_future(client.generate("abc", max_new_tokens=2))
            while not any(each.num_others for each in client.servers()):
                await asyncio.sleep(0.001)
            second = await client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
            assert second.sequences[0].text == "de"
            assert sorted(each.num_outstanding for each in client.servers()) == [0, 1]
            first.cancel()

    with (
        running_server(max_waiting=40) as one,
        running_server(max_waiting=40) as other,
        Client(address_of([one, other]), NEVER) as client,
        ThreadPoolExecutor(21) as threads,
    ):
        address = home_of(client, "abc")
        home = one if one.address == address else other
        home.session.hold()
        with Client(address, NEVER) as rude:
            running = [threads.submit(ask, rude, "abc") for _ in range(20)]
            home.wait_for_requests(20)
            running.append(threads.submit(ask, client, "abc"))
            wait_until(lambda: state_of(client, address).num_others == 20, "it has told")
            assert home_of(client, "abc") != address
            asyncio.run(ask_in_asyncio(address_of([one, other])))
            home.session.let_go()
            assert {each.result(TIMEOUT_S) for each in running} == {"de"}
        assert state_of(client, address).num_others < 20
        home.wait_for_requests(0)
        with Client(address_of([one, other]), NEVER) as new:
            assert home_of(new, "abc") == address


def test_server_that_refuses_is_not_taken_for_one_that_never_tells() -> None:
    """Else a client whose first call met a full queue would believe nobody."""

    async def ask_in_asyncio(address: str) -> None:
        async with AsyncClient(address, NEVER) as client:
            with pytest.raises(CallError):
                await client.generate("", timeout_s=TIMEOUT_S)
            with pytest.raises(CallError):
                [chunk async for chunk in client.stream("", timeout_s=TIMEOUT_S)]
            assert sum(begun(client).values()) == 2
            assert not any(each.is_silent for each in client.servers())

    with several(2) as servers, Client(address_of(servers), NEVER) as client:
        with pytest.raises(CallError):
            client.generate("", timeout_s=TIMEOUT_S)
        with pytest.raises(CallError):
            list(client.stream("", timeout_s=TIMEOUT_S))
        assert sum(begun(client).values()) == 2
        assert not any(each.is_silent for each in client.servers())
        asyncio.run(ask_in_asyncio(address_of(servers)))


def test_server_that_drains_is_left_before_it_refuses_anything() -> None:
    with several(2) as servers, Client(address_of(servers), NEVER) as client:
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


def test_first_call_minds_neither_the_dead_nor_the_silent() -> None:
    with running_server() as running, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"quill://127.0.0.1:1,127.0.0.1:{silent.getsockname()[1]},{running.address}"
        with Client(address, NEVER) as client:
            assert {home_of(client, prompt) for prompt in "abcdefgh"} == {running.address}
            assert [each.is_serving for each in client.servers()].count(True) == 1


def test_first_call_keeps_half_of_its_time_for_those_who_speak() -> None:
    async def main(address: str) -> str:
        async with AsyncClient(address, NEVER) as client:
            answer = await client.generate("abc", max_new_tokens=2, timeout_s=HEAR_S / 2)
            return answer.sequences[0].text

    with running_server() as running, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"quill://127.0.0.1:{silent.getsockname()[1]},{running.address}"
        with Client(address, NEVER) as client:
            answer = client.generate("abc", max_new_tokens=2, timeout_s=HEAR_S / 2)
            assert answer.sequences[0].text == "de"
        assert asyncio.run(main(address)) == "de"


def test_call_that_one_server_refuses_is_asked_elsewhere_at_once() -> None:
    """Full queues: the server says when to come back, and another has room now."""
    waits: list[float] = []
    with (
        running_server(max_num_seqs=1, max_waiting=1) as full,
        running_server() as other,
        Client(full.address, NEVER) as rude,
        Client(address_of([full, other]), Retries(), waits.append) as client,
    ):
        full.session.hold()
        full.session.let_go(1)
        blocking = rude.stream("abc", max_new_tokens=50, timeout_s=TIMEOUT_S)
        next(blocking)
        waiting = threading.Thread(target=ask, args=(rude, "abc"))
        waiting.start()
        full.wait_for_waiting(1)
        assert {ask(client, prompt) for prompt in "abcdefgh"} >= {"bc", "ij"}
        assert set(waits) <= {0.0}
        assert state_of(client, full.address).num_failed > 0
        assert state_of(client, full.address).is_serving
        blocking.close()
        full.session.let_go()
        waiting.join(TIMEOUT_S)


def test_nobody_who_answers_is_told_as_that() -> None:
    with Client("quill://127.0.0.1:1,127.0.0.1:2", Retries(first_s=0.001)) as client:
        with pytest.raises(CallError, match="no server answers"):
            client.model()
        assert sum(each.num_begun for each in client.servers()) == 6


def test_name_is_followed_as_its_addresses_change(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[str] = []

    def resolve(name: str) -> tuple[str, ...]:
        assert name == "quill.example:50051"
        if not known:
            raise OSError("no such name")
        return tuple(known)

    monkeypatch.setattr(fleet, "resolve", resolve)
    monkeypatch.setattr(fleet, "RESOLVE_S", 0.01)
    monkeypatch.setattr(fleet, "HEAR_S", 0.5)
    with several(2) as (first, second), Client("quill+dns://quill.example:50051", NEVER) as client:
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


def test_name_that_stands_for_this_machine() -> None:
    with running_server() as running:
        address = f"quill+dns://localhost:{running.server.port}"

        async def main() -> str:
            async with AsyncClient(address) as client:
                answer = await client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
                return answer.sequences[0].text

        with Client(address) as client:
            assert ask(client, "abc") == "de"
        assert asyncio.run(main()) == "de"


@pytest.mark.parametrize("form", ["quill://127.0.0.1:{}", "quill+dns://localhost:{}"])
def test_each_server_is_known_by_its_certificate_and_asks_for_the_key(
    form: str, tmp_path: Path
) -> None:
    ours = Authority("ours")
    secret = add_key(tmp_path / "keys.json", "alice")
    files = write(tmp_path, ours.sign("server"))
    with running_server(tls=files, api_keys=tmp_path / "keys.json", metrics_port=0) as running:
        address = form.format(running.server.port)

        async def main(access: Access) -> str:
            async with AsyncClient(address, NEVER, access=access) as client:
                answer = await client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
                return answer.sequences[0].text

        access = Access(ca=ours.cert, api_key=secret)
        with Client(address, NEVER, access=access) as client:
            assert ask(client, "abc") == "de"
        assert asyncio.run(main(access)) == "de"
        with (
            Client(address, NEVER, access=Access(ca=ours.cert)) as client,
            pytest.raises(CallError, match="UNAUTHENTICATED"),
        ):
            ask(client, "abc")
        with pytest.raises(CallError, match="isn't good for the authority"):
            asyncio.run(main(Access(ca=Authority("theirs").cert)))


@pytest.mark.parametrize("scheme", ["", "quill://"])
def test_this_machine_is_asked_by_no_proxy(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be shown the API key, which goes to this machine in the clear."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def ask_in_asyncio(address: str) -> str:
        async with AsyncClient(address, NEVER) as client:
            answer = await client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
            return answer.sequences[0].text

    with running_server() as running, Client(scheme + running.address, NEVER) as client:
        assert ask(client, "abc") == "de"
        assert asyncio.run(ask_in_asyncio(scheme + running.address)) == "de"


def test_key_is_shown_to_no_machine_in_the_clear() -> None:
    access = Access(api_key="secret")
    for make in (Client, AsyncClient):
        for address in ("quill://127.0.0.1:1,example.org:1", "quill+dns://example.org:1"):
            with pytest.raises(AccessError, match=r"example\.org could read"):
                make(address, access=access)

"""The balancer: affinity up to a load bound, health, load reports, the hash ring."""

import random
import subprocess
import sys
from collections import Counter

import pytest

from quill.server.client.balancer import REPORT_S, Balancer, Ring, bound
from quill.server.client.target import BALANCES, Balance

SERVERS = ("a:1", "b:1", "c:1")


def balancer(balance: Balance = "affinity", servers: tuple[str, ...] = SERVERS) -> Balancer:
    made = Balancer(balance)
    made.set_servers(servers, are_serving=True)
    return made


def outstanding(given: Balancer) -> dict[str, int]:
    return {each.address: each.num_outstanding for each in given.states()}


def test_bound_is_a_quarter_or_two_standard_deviations_above_the_mean() -> None:
    assert [bound(mean) for mean in (0.1, 1.0, 4.0, 16.0)] == [1, 3, 8, 24]
    assert [bound(mean) for mean in (64.0, 100.0, 1000.0)] == [80, 125, 1250]


def test_calls_beyond_the_bound_overflow_in_ring_order() -> None:
    given = balancer()
    asked = [given.begin(b"one") for _ in range(300)]
    order = list(dict.fromkeys(asked))
    assert sorted(order) == list(SERVERS)
    assert asked[:5] == [order[0]] * 5
    assert list(outstanding(given).values()) != [100, 100, 100]
    assert max(outstanding(given).values()) <= 125
    again = balancer()
    assert [again.begin(b"one") for _ in range(300)] == asked


@pytest.mark.parametrize("seed", range(10))
def test_no_server_has_more_calls_than_its_bound(seed: int) -> None:
    chance = random.Random(seed)
    servers = tuple(f"s{number}:1" for number in range(chance.randrange(1, 9)))
    given = balancer(servers=servers)
    running: list[str] = []
    for _ in range(2000):
        if running and chance.random() < 0.48:
            given.end(running.pop(chance.randrange(len(running))))
            continue
        key = str(min(chance.randrange(20), chance.randrange(20))).encode()
        server = given.begin(key)
        running.append(server)
        assert outstanding(given)[server] <= bound(len(running) / len(servers))
        assert Counter(running) == Counter(outstanding(given))


@pytest.mark.parametrize("balance", BALANCES)
def test_same_calls_are_balanced_in_the_same_way(balance: Balance) -> None:
    def asked() -> list[str]:
        given, chance = balancer(balance), random.Random(1)
        return [given.begin(str(chance.randrange(5)).encode()) for _ in range(100)]

    assert asked() == asked()


@pytest.mark.parametrize("balance", BALANCES)
def test_server_that_does_not_serve_is_left_and_comes_back(balance: Balance) -> None:
    given = balancer(balance)
    assert given.set_serving("b:1", False)
    assert not given.set_serving("b:1", False)
    asked = {given.begin(str(number).encode()) for number in range(50)}
    assert asked == {"a:1", "c:1"}
    given.set_serving("b:1", True)
    assert "b:1" in {given.begin(str(number).encode()) for number in range(50)}


@pytest.mark.parametrize("balance", BALANCES)
def test_failed_server_is_avoided_while_another_serves(balance: Balance) -> None:
    given = balancer(balance)
    for _ in range(20):
        assert given.begin(b"one", {"a:1", "b:1"}) == "c:1"
    assert given.has_other({"a:1", "b:1"})
    given.set_serving("c:1", False)
    assert not given.has_other({"a:1", "b:1"})
    assert given.begin(b"one", {"a:1", "b:1"}) in {"a:1", "b:1"}


def test_a_server_is_picked_even_if_none_is_known_to_serve() -> None:
    given = balancer()
    for server in SERVERS:
        given.set_serving(server, False)
    assert given.begin(b"one") in SERVERS


def test_fewest_outstanding_and_turns() -> None:
    given = balancer("least")
    first = [given.begin(b"one") for _ in range(3)]
    assert sorted(first) == list(SERVERS)
    given.end("b:1")
    assert given.begin(b"one") == "b:1"
    turns = balancer("round-robin")
    assert [turns.begin(b"one") for _ in range(6)] == [*SERVERS, *SERVERS]


def test_call_without_a_key_goes_to_the_least_loaded_server() -> None:
    given = balancer()
    assert sorted(given.begin(None) for _ in range(3)) == list(SERVERS)


def test_server_that_leaves_ends_its_calls_and_one_that_stays_keeps_its_counts() -> None:
    given = balancer()
    begun = [given.begin(None) for _ in range(6)]
    given.set_servers(("b:1", "d:1"), are_serving=False)
    assert [each.address for each in given.states()] == ["b:1", "d:1"]
    assert [each.is_serving for each in given.states()] == [True, False]
    assert outstanding(given) == {"b:1": 2, "d:1": 0}
    assert given.knows("a:1")
    for server in begun:
        given.end(server, has_failed=server == "b:1")
    assert not given.knows("a:1")
    assert outstanding(given) == {"b:1": 0, "d:1": 0}
    assert [each.num_failed for each in given.states()] == [2, 0]


def home_of(given: Balancer, key: bytes, now_s: float = 0.0) -> str:
    home = given.begin(key, now_s=now_s)
    given.end(home)
    return home


def with_loaded_home(now_s: float) -> tuple[Balancer, str]:
    """And the key's home, which others' calls make too loaded."""
    given = balancer()
    home = home_of(given, b"one")
    for server in SERVERS:
        given.set_load(server, 20 if server == home else 2, now_s)
    assert home_of(given, b"one", now_s) != home
    return given, home


def test_load_of_other_clients_counts_until_the_next_report() -> None:
    given, home = with_loaded_home(0.0)
    given.set_load("gone:1", 40, 0.0)  # left meanwhile
    given.set_load(home, 4, 1.0)
    assert home_of(given, b"one", 1.0) == home


@pytest.mark.parametrize("balance", ["affinity", "least"])
def test_call_without_a_key_goes_to_the_least_reported_load(balance: Balance) -> None:
    given = balancer(balance)
    for server, num_calls in zip(SERVERS, (7, 3, 5), strict=True):
        given.set_load(server, num_calls, 0.0)
    asked = [given.begin(None) for _ in range(9)]
    assert asked[:2] == ["b:1", "b:1"]
    assert Counter(asked) == {"a:1": 1, "b:1": 5, "c:1": 3}


def test_own_calls_are_not_counted_twice() -> None:
    """One client alone is balanced as without reports."""
    without, with_reports = balancer(), balancer()
    chance = random.Random(1)
    running: list[str] = []
    for step in range(2000):
        if running and chance.random() < 0.49:
            server = running.pop(chance.randrange(len(running)))
            without.end(server)
            with_reports.end(server)
        else:
            key = str(min(chance.randrange(20), chance.randrange(20))).encode()
            server = without.begin(key)
            assert with_reports.begin(key, now_s=0.01 * step) == server
            running.append(server)
        with_reports.set_load(server, running.count(server), 0.01 * step)


def test_load_report_expires() -> None:
    given, home = with_loaded_home(100.0)
    assert home_of(given, b"one", 100.0 + REPORT_S) != home
    assert home_of(given, b"one", 101.0 + REPORT_S) == home


def test_server_that_comes_back_has_no_load_report() -> None:
    given, home = with_loaded_home(0.0)
    given.set_serving(home, False)
    given.set_serving(home, True)
    assert home_of(given, b"one") == home


@pytest.mark.parametrize("num_clients", [4, 16])
def test_bound_holds_for_several_clients_together(num_clients: int) -> None:
    """All clients have the same key, and a report at the start and the end of each call."""
    servers = tuple(f"s{number}:1" for number in range(10))
    clients = [balancer(servers=servers) for _ in range(num_clients)]
    chance, load = random.Random(num_clients), Counter[str]()
    running: list[tuple[Balancer, str]] = []
    for step in range(6000):
        now_s = step / 1000
        if len(running) >= 100:
            client, server = running.pop(chance.randrange(len(running)))
            client.end(server)
            load[server] -= 1
        else:
            client = chance.choice(clients)
            server = client.begin(b"one", now_s=now_s)
            running.append((client, server))
            load[server] += 1
        client.set_load(server, load[server], now_s)
        assert step < 1000 or max(load.values()) <= 2.4 * len(running) / len(servers)


MANY_KEYS = [f"key {number}".encode() for number in range(3000)]


def names(number: int) -> list[str]:
    return [f"10.0.0.{each}:50051" for each in range(number)]


def homes(ring: Ring) -> dict[bytes, str]:
    return {key: next(ring.order(key)) for key in MANY_KEYS}


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_order_has_every_server_once(number: int) -> None:
    ring = Ring(names(number))
    for key in MANY_KEYS[:50]:
        assert sorted(ring.order(key)) == names(number)
    assert list(Ring(()).order(b"key")) == []


@pytest.mark.parametrize("seed", range(5))
def test_removed_server_moves_only_its_own_keys_each_to_its_next(seed: int) -> None:
    chance = random.Random(seed)
    servers = names(chance.randrange(2, 12))
    gone = chance.choice(servers)
    ring, rest = Ring(servers), Ring(each for each in servers if each != gone)
    for key in MANY_KEYS[:500]:
        assert list(rest.order(key)) == [each for each in ring.order(key) if each != gone]


def test_shares_are_about_even() -> None:
    shares = Counter(homes(Ring(names(5))).values())
    assert max(shares.values()) < 1.3 * len(MANY_KEYS) / 5
    assert min(shares.values()) > 0.7 * len(MANY_KEYS) / 5


def test_servers_that_are_listed_in_another_order_have_the_same_keys() -> None:
    assert homes(Ring(names(5))) == homes(Ring(reversed(names(5))))


def test_every_process_sends_a_key_to_the_same_server() -> None:
    program = (
        f"from quill.server.client.balancer import Ring;print(list(Ring({names(9)}).order(b'key')))"
    )
    others = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert others == {str(list(Ring(names(9)).order(b"key")))}

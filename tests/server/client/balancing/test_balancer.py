"""Who is asked next: affinity up to a bound, health, counts that add up."""

import math
import random
from collections import Counter

import pytest

from quill.server.client.balancing.balancer import MAX_LOAD, Balancer
from quill.server.client.balancing.target import BALANCES, Balance

SERVERS = ("a:1", "b:1", "c:1")


def balancer(balance: Balance = "affinity", servers: tuple[str, ...] = SERVERS) -> Balancer:
    made = Balancer(balance)
    made.set_servers(servers, are_serving=True)
    return made


def outstanding(given: Balancer) -> dict[str, int]:
    return {each.address: each.num_outstanding for each in given.states()}


def test_calls_that_begin_alike_go_to_one_server() -> None:
    given = balancer()
    for key in (b"one", b"two", b"three", b"four"):
        asked = set()
        for _ in range(10):
            server = given.begin(key)
            given.end(server)
            asked.add(server)
        assert len(asked) == 1


def test_beginning_that_everybody_asks_for_overflows_in_the_same_order() -> None:
    given = balancer()
    first, second, third = (given.begin(b"one") for _ in range(3))
    assert first != second
    assert third == first  # by then 1.25 times the mean is more than one call
    assert balancer().begin(b"one") == first


@pytest.mark.parametrize("seed", range(10))
def test_no_server_has_more_than_its_bound_whatever_comes_and_goes(seed: int) -> None:
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
        assert outstanding(given)[server] <= math.ceil(MAX_LOAD * len(running) / len(servers))
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
    assert given.note("b:1", False)
    assert not given.note("b:1", False)
    asked = {given.begin(str(number).encode()) for number in range(50)}
    assert asked == {"a:1", "c:1"}
    given.note("b:1", True)
    assert "b:1" in {given.begin(str(number).encode()) for number in range(50)}


@pytest.mark.parametrize("balance", BALANCES)
def test_whoever_failed_is_avoided_while_another_serves(balance: Balance) -> None:
    given = balancer(balance)
    for _ in range(20):
        assert given.begin(b"one", {"a:1", "b:1"}) == "c:1"
    assert given.has_other({"a:1", "b:1"})
    given.note("c:1", False)
    assert not given.has_other({"a:1", "b:1"})
    assert given.begin(b"one", {"a:1", "b:1"}) in {"a:1", "b:1"}


def test_if_nobody_is_said_to_serve_somebody_is_asked() -> None:
    given = balancer()
    for server in SERVERS:
        given.note(server, False)
    assert given.begin(b"one") in SERVERS


def test_fewest_outstanding_and_turns() -> None:
    given = balancer("least")
    first = [given.begin(b"one") for _ in range(3)]
    assert sorted(first) == list(SERVERS)
    given.end("b:1")
    assert given.begin(b"one") == "b:1"
    turns = balancer("round-robin")
    assert [turns.begin(b"one") for _ in range(6)] == [*SERVERS, *SERVERS]


def test_call_without_a_key_goes_where_the_fewest_are() -> None:
    given = balancer()
    assert sorted(given.begin(None) for _ in range(3)) == list(SERVERS)


def test_server_that_left_ends_its_calls_and_one_that_stays_keeps_its_numbers() -> None:
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

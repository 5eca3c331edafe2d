"""Where keys go, and which of them move when servers come and go."""

import random
import subprocess
import sys
from collections import Counter

import pytest

from quill.server.client.balancing.ring import Ring

KEYS = [f"key {number}".encode() for number in range(3000)]


def names(number: int) -> list[str]:
    return [f"10.0.0.{each}:50051" for each in range(number)]


def homes(ring: Ring) -> dict[bytes, str]:
    return {key: next(ring.order(key)) for key in KEYS}


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_order_has_every_server_once(number: int) -> None:
    ring = Ring(names(number))
    for key in KEYS[:50]:
        assert sorted(ring.order(key)) == names(number)
    assert list(Ring(()).order(b"key")) == []


@pytest.mark.parametrize("seed", range(5))
def test_removed_server_moves_only_its_own_keys_each_to_its_next(seed: int) -> None:
    chance = random.Random(seed)
    servers = names(chance.randrange(2, 12))
    gone = chance.choice(servers)
    ring, rest = Ring(servers), Ring(each for each in servers if each != gone)
    for key in KEYS[:500]:
        assert list(rest.order(key)) == [each for each in ring.order(key) if each != gone]


def test_shares_are_about_even() -> None:
    shares = Counter(homes(Ring(names(5))).values())
    assert max(shares.values()) < 1.3 * len(KEYS) / 5
    assert min(shares.values()) > 0.7 * len(KEYS) / 5


def test_servers_that_are_listed_in_another_order_have_the_same_keys() -> None:
    assert homes(Ring(names(5))) == homes(Ring(reversed(names(5))))


def test_every_process_sends_a_key_to_the_same_server() -> None:
    program = (
        "from quill.server.client.balancing.ring import Ring;"
        f"print(list(Ring({names(9)}).order(b'key')))"
    )
    others = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert others == {str(list(Ring(names(9)).order(b"key")))}

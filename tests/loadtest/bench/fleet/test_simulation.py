"""A fleet in simulated time: every call ends once, and in the same way every time."""

from dataclasses import replace

import pytest

from quill.loadtest.bench.fleet.outcome import is_good, summarize
from quill.loadtest.bench.fleet.replica import Replica, StepCost
from quill.loadtest.bench.fleet.simulation import (
    CallState,
    FleetShape,
    Simulated,
    Simulation,
    Trouble,
)
from quill.loadtest.bench.fleet.traffic import Traffic
from quill.server.client.target import BALANCES, Balance
from quill.server.limits import Limits
from quill.server.request import Request

LIMITS = Limits(max_num_seqs=16, context=512, num_blocks=120, speculative=False)
SHAPE = FleetShape(num_replicas=4, num_clients=2, limits=LIMITS)
RATE, DURATION_S = 20.0, 5.0


def simulate(
    balance: Balance, *troubles: Trouble, shape: FleetShape = SHAPE, rate: float = RATE
) -> Simulated:
    calls = Traffic(seed=1, rate=rate, num_apps=20).calls(DURATION_S)
    return Simulation(shape, balance, seed=1).run(calls, troubles)


def times(result: Simulated) -> list[tuple[float | None, float | None, int]]:
    return [(each.first_s, each.end_s, each.server) for each in result.calls]


def test_traffic_is_a_function_of_its_seed() -> None:
    first, again, other = (list(Traffic(seed, 50.0, 20).calls(3.0)) for seed in (1, 1, 2))
    assert first == again != other
    assert 100 < len(first) < 200
    shares = [each.key for each in first]
    assert shares.count(b"0") > 2 * shares.count(b"5")
    alike = [each.prompt_ids for each in first if each.key == b"0"]
    assert len({ids[:64] for ids in alike}) == 1
    assert len(set(alike)) == len(alike)


def test_replica_takes_as_long_as_its_tokens_cost() -> None:
    replica = Replica(LIMITS, StepCost(step_ms=5.0, row_ms=1.0, prompt_token_ms=0.5), 2)
    prompt = tuple(range(20))
    assert replica.add(Request(request_id="a", prompt_ids=prompt, max_new_tokens=2))
    assert replica.begin_step() == pytest.approx(0.005 + 20 * 0.0005)
    assert replica.end_step().begun == ["a"]
    assert replica.begin_step() == pytest.approx(0.006)
    assert replica.end_step().finished == ["a"]
    assert replica.begin_step() is None
    assert replica.add(Request(request_id="b", prompt_ids=prompt, max_new_tokens=1))
    assert replica.begin_step() == pytest.approx(0.005 + 4 * 0.0005)  # a block was known
    replica.end_step()
    assert (replica.num_prompt, replica.num_cached) == (40, 16)


@pytest.mark.parametrize("balance", BALANCES)
def test_every_call_ends_and_a_repetition_is_the_same_to_the_last_bit(balance: Balance) -> None:
    result = simulate(balance)
    assert len(result.calls) > 60
    assert all(each.end_s is not None and not each.has_failed for each in result.calls)
    assert times(result) == times(simulate(balance))


def test_affinity_finds_more_in_the_caches_than_turns() -> None:
    outcomes = {
        balance: summarize(balance, simulate(balance), 1.0, DURATION_S) for balance in BALANCES
    }
    assert outcomes["affinity"].hit_rate > 1.2 * outcomes["round-robin"].hit_rate
    assert outcomes["affinity"].p50_first_s < outcomes["round-robin"].p50_first_s


@pytest.mark.parametrize("balance", BALANCES)
def test_calls_of_dead_replicas_are_made_again_elsewhere(balance: Balance) -> None:
    result = simulate(balance, Trouble(range(2), 1.0, 4.0))
    assert result.num_retries > 0
    assert all(each.end_s is not None and not each.has_failed for each in result.calls)
    for each in result.calls:
        if 1.0 < each.call.at_s < 4.0 and each.end_s is not None and each.end_s < 4.0:
            assert each.server in (2, 3)
    assert {each.server for each in result.calls if each.call.at_s > 4.0} >= {0, 1}


def test_slow_replica_keeps_turns_waiting_and_not_those_who_look_at_its_load() -> None:
    trouble = Trouble([3], 0.0, 100.0, slowness=6.0)
    loads = {
        balance: summarize(balance, simulate(balance, trouble), 1.0, DURATION_S)
        for balance in BALANCES
    }
    assert loads["round-robin"].imbalance > 2
    assert loads["affinity"].imbalance < loads["round-robin"].imbalance
    assert loads["affinity"].p99_first_s < loads["round-robin"].p99_first_s


def test_full_queues_send_calls_elsewhere_and_at_last_away() -> None:
    shape = replace(SHAPE, max_waiting=1, limits=replace(LIMITS, max_num_seqs=1))
    result = simulate("least", shape=shape, rate=100.0)
    failed = [each for each in result.calls if each.has_failed]
    assert 0 < len(failed) < len(result.calls)
    assert all(each.num_tries == 6 and each.end_s is None for each in failed)
    outcome = summarize("least", result, 0.0, DURATION_S)
    assert outcome.num_failed == len(failed)
    assert outcome.share_good < 1


def test_call_is_good_if_it_begins_soon_and_goes_on_fast() -> None:
    call = next(Traffic(1, 10.0, 3).calls(1.0))
    soon = call.at_s + 0.9
    fast = soon + 0.09 * (call.num_new - 1)
    assert is_good(CallState(call, 0, first_s=soon, end_s=fast))
    assert not is_good(CallState(call, 0, first_s=soon + 0.2, end_s=fast))
    assert not is_good(CallState(call, 0, first_s=soon, end_s=fast + 1.0))
    assert not is_good(CallState(call, 0))

"""The file of API keys, and the commands that change it."""

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from quill.__main__ import main
from quill.server.auth.caller import BURST_S, Caller, Quotas
from quill.server.auth.key_file import Keyring, KeysError, add_key, digest, read_keys, revoke_key
from quill.server.errors import QuotaError, RevokedError, UnauthenticatedError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def bearer(secret: str) -> list[str]:
    return [f"Bearer {secret}"]


def test_file_holds_hashes_and_only_its_owner_reads_it(path: Path) -> None:
    secret = add_key(path, "alice", requests_per_minute=60)
    assert len(secret) >= 40
    assert secret not in path.read_text()
    assert digest(secret) in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_change_keeps_the_files_mode(path: Path) -> None:
    add_key(path, "alice")
    path.chmod(0o640)
    add_key(path, "bob")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in path.parent.iterdir()] == ["keys.json"], "nothing is left over"


def test_name_is_given_once_even_after_a_revocation(path: Path) -> None:
    add_key(path, "alice")
    revoke_key(path, "alice")
    with pytest.raises(KeysError, match="another name"):
        add_key(path, "alice")
    with pytest.raises(KeysError, match="no key named bob; there are: alice"):
        revoke_key(path, "bob")


@pytest.mark.parametrize("name", ["", "two words", "-x", "a" * 65, "a\nb", "ключ"])
def test_name_that_would_garble_a_log_is_refused(name: str, path: Path) -> None:
    with pytest.raises(KeysError, match="can't be a key's name"):
        add_key(path, name)


def test_many_who_add_at_once_lose_nothing(path: Path) -> None:
    names = [f"key-{number}" for number in range(20)]
    threads = [threading.Thread(target=add_key, args=(path, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in read_keys(path)) == sorted(names)


GOOD = {"name": "a", "sha256": "0" * 64}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"format": 2, "keys": []}',
        b'{"format": 1}',
        b'{"format": 1, "keys": [1]}',
        b"[" * 200_000,
        json.dumps({"format": 1, "keys": [GOOD, GOOD]}).encode(),
        *(
            json.dumps({"format": 1, "keys": [GOOD | wrong]}).encode()
            for wrong in (
                {"sha256": "0" * 63},
                {"sha256": None},
                {"name": 1},
                {"name": "a\nb"},
                {"max_concurrent": 0},
                {"max_concurrent": True},
                {"requests_per_minute": "60"},
                {"tokens_per_minute": 0},
                {"tokens_per_minute": 1e6},
                {"max_prompt_tokens": -1},
                {"max_prompt_tokens": False},
                {"secret": "x"},
                {"admin": "no"},
                {"revoked": 5},
            )
        ),
    ],
)
def test_file_that_makes_no_sense_is_refused(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(KeysError):
        read_keys(path)


def test_change_goes_through_a_link_to_the_file(path: Path, tmp_path: Path) -> None:
    add_key(path, "alice")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    revoke_key(link, "alice")
    assert link.is_symlink()
    assert read_keys(path)[0].revoked


def test_key_is_known_by_its_hash_until_it_is_revoked(path: Path) -> None:
    limits: Any = {"max_concurrent": 3, "tokens_per_minute": 4, "max_prompt_tokens": 5}
    secret, other = add_key(path, "alice", **limits), add_key(path, "bob", admin=True)
    keyring = Keyring(path)
    assert keyring.identify(bearer(secret)) == Caller(name="alice", **limits)
    assert keyring.identify([f"bearer {other}"]) == Caller(name="bob", admin=True)
    revoke_key(path, "alice")
    with pytest.raises(RevokedError, match="alice"):
        keyring.identify(bearer(secret))
    assert keyring.identify(bearer(other)).name == "bob"


def test_key_added_later_is_known_at_once(path: Path) -> None:
    add_key(path, "alice")
    keyring = Keyring(path)
    assert keyring.identify(bearer(add_key(path, "bob"))).name == "bob"


def test_file_that_breaks_while_serving_leaves_the_keys_as_they_were(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = add_key(path, "alice")
    keyring = Keyring(path)
    for harm in (lambda: path.write_text("{"), path.unlink, lambda: os.mkfifo(path)):
        harm()
        assert keyring.identify(bearer(secret)).name == "alice"
        assert keyring.identify(bearer(secret)).name == "alice"
    assert caplog.text.count("the last good one stays") == 3, "once for each change"


def test_whatever_isnt_one_known_key_is_refused(path: Path) -> None:
    secret = add_key(path, "alice")
    keyring = Keyring(path)
    wrong = [[], ["Bearer "], ["Bearer"], [secret], [f"Basic {secret}"], bearer("x" * 9999)]
    wrong += [
        [f"Bearer  {secret}"],
        bearer(secret[:-1]),
        bearer(digest(secret)),
        bearer(secret) * 2,
    ]
    for headers in wrong:
        with pytest.raises(UnauthenticatedError) as caught:
            keyring.identify(headers)
        assert secret not in str(caught.value)


def test_every_key_is_compared_whichever_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [add_key(path, f"key-{number}") for number in range(5)]
    keyring, compared = Keyring(path), list[str]()

    def compare(one: str, other: str) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    for number, secret in enumerate(secrets):
        assert keyring.identify(bearer(secret)).name == f"key-{number}"
    assert compared == [digest(secret) for secret in secrets] * 5


def test_front_door_makes_lists_and_revokes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--requests-per-minute", "60", "--max-concurrent", "2"]
    assert main(["keys", "add", str(path), "alice", *limits]) == 0
    secret = capsys.readouterr().out.strip()
    assert Keyring(path).identify(bearer(secret)).requests_per_minute == 60
    assert main(["keys", "add", str(path), "boss", "--admin"]) == 0
    tokens = ["--tokens-per-minute", "6000", "--max-prompt-tokens", "500"]
    assert main(["keys", "add", str(path), "carol", *tokens]) == 0
    assert main(["keys", "revoke", str(path), "alice"]) == 0
    capsys.readouterr()
    assert main(["keys", "list", str(path)]) == 0
    alice, boss, carol = capsys.readouterr().out.splitlines()
    assert alice.startswith("alice: revoked ")
    assert alice.endswith("60/min, 2 at once")
    assert boss.endswith("any rate, any number at once, admin")
    assert carol.endswith("any number at once, 6000 tokens/min, prompts up to 500 tokens")
    assert main(["keys", "list", str(path.parent / "nowhere")]) == 1
    assert "`quill keys add` makes one" in capsys.readouterr().err


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_rate_allows_a_burst_and_then_what_was_agreed() -> None:
    clock = Clock()
    quotas, caller = Quotas(clock), Caller(name="alice", requests_per_minute=120)

    def num_allowed() -> int:
        for number in range(1000):
            try:
                with quotas.call(caller):
                    pass
            except QuotaError as error:
                delays.append(error.retry_after_s)
                return number
        raise AssertionError("there is no limit")

    delays = list[float]()
    assert num_allowed() == 2 * BURST_S
    assert num_allowed() == 0
    clock.now_s += 3
    assert num_allowed() == 6
    clock.now_s += 1000
    assert num_allowed() == 2 * BURST_S
    assert delays == [pytest.approx(0.5)] * 4


def test_help_tells_of_the_burst(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "add", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"{BURST_S:g} seconds' worth is allowed" in text


def test_wait_that_the_caller_is_told_is_enough() -> None:
    clock = Clock()
    quotas, caller = Quotas(clock), Caller(name="alice", requests_per_minute=1)
    with quotas.call(caller):
        pass
    clock.now_s += 12.5
    with pytest.raises(QuotaError) as caught, quotas.call(caller):
        pass
    clock.now_s += caught.value.retry_after_s + 1e-9
    with quotas.call(caller):
        pass


def test_running_calls_are_counted_for_each_caller() -> None:
    quotas = Quotas()
    alice, bob = (Caller(name=name, max_concurrent=2) for name in ("alice", "bob"))
    with quotas.call(alice), quotas.call(alice):
        with pytest.raises(QuotaError, match="2 calls running"), quotas.call(alice):
            pass
        with quotas.call(bob):
            pass
    with pytest.raises(KeyError), quotas.call(alice):
        raise KeyError
    with quotas.call(alice), quotas.call(alice):
        pass


def use(quotas: Quotas, caller: Caller, num_prompt: int, num_generated: int) -> None:
    """A request that is answered."""
    with quotas.tokens(caller, num_prompt) as spending:
        spending.is_read = True
        spending.note(num_generated)


def delay_of(quotas: Quotas, caller: Caller, num_prompt: int) -> float:
    """Of a request that is refused."""
    with pytest.raises(QuotaError) as caught, quotas.tokens(caller, num_prompt):
        pass
    return caught.value.retry_after_s


def test_tokens_are_counted_at_both_ends_and_paid_back_in_time() -> None:
    clock = Clock()
    quotas, alice = Quotas(clock), Caller(name="alice", tokens_per_minute=600)  # 100 at once
    use(quotas, alice, 40, 20)
    assert delay_of(quotas, alice, 50) == pytest.approx(1.0), "40 are left, and 10 come a second"
    use(quotas, alice, 40, 500)
    assert delay_of(quotas, alice, 1) == pytest.approx(50.1), "what was overdrawn is owed"
    clock.now_s += delay_of(quotas, alice, 1) + 1e-6
    use(quotas, alice, 1, 0)
    use(quotas, Caller(name="bob", tokens_per_minute=600), 100, 0)


def test_average_of_tokens_holds_for_prompts_longer_than_the_bucket_is_deep() -> None:
    clock = Clock()
    quotas, alice = Quotas(clock), Caller(name="alice", tokens_per_minute=600)
    for _ in range(4):
        use(quotas, alice, 1000, 0)
        clock.now_s += delay_of(quotas, alice, 1000) + 1e-6
    assert clock.now_s == pytest.approx(4 * 1000 / 10, rel=1e-3)


def test_answer_is_paid_as_it_comes_and_a_prompt_that_was_never_read_is_given_back() -> None:
    quotas, alice = Quotas(Clock()), Caller(name="alice", tokens_per_minute=600)
    with quotas.tokens(alice, 60) as spending:
        assert delay_of(quotas, alice, 60) == pytest.approx(2.0), "40 are left"
        spending.note(30)
        assert delay_of(quotas, alice, 60) == pytest.approx(5.0)
    use(quotas, alice, 100, 0)
    assert delay_of(quotas, alice, 10) == pytest.approx(1.0)


def test_a_call_that_was_let_in_is_let_in_whole_and_the_next_one_waits() -> None:
    quotas, alice = Quotas(Clock()), Caller(name="alice", tokens_per_minute=600)
    for is_admitted in (False, True, True):
        with quotas.tokens(alice, 80, is_admitted) as spending:
            spending.is_read = True
    assert delay_of(quotas, alice, 1) == pytest.approx(14.1), "240 of 100 were used"


def test_refusal_says_how_many_tokens_are_allowed_left_and_wanted() -> None:
    quotas, alice = Quotas(Clock()), Caller(name="alice", tokens_per_minute=600)
    use(quotas, alice, 70, 0)
    with pytest.raises(QuotaError, match=r"600 tokens a minute; 30 are left now and .* has 42"):
        use(quotas, alice, 42, 0)
    use(quotas, alice, 30, 99)
    with pytest.raises(QuotaError, match="; 0 are left"):
        use(quotas, alice, 42, 0)


def test_caller_without_a_limit_of_tokens_may_use_any_number() -> None:
    quotas = Quotas(Clock())
    for _ in range(3):
        use(quotas, Caller(name="alice"), 10**6, 10**6)


def test_limit_that_changes_counts_from_the_next_call_on() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    use(quotas, Caller(name="alice", tokens_per_minute=600), 100, 0)
    fast = Caller(name="alice", tokens_per_minute=6000)
    assert delay_of(quotas, fast, 50) == pytest.approx(0.5)
    clock.now_s += 0.5 + 1e-6
    use(quotas, fast, 50, 0)

"""Addresses of one server and of several."""

import argparse

import pytest

from quill.__main__ import build_parser
from quill.server.cli.arguments import addresses
from quill.server.client.target import Target, TargetError, read_target, resolve


def test_one_server_is_asked_as_ever() -> None:
    assert read_target("localhost:1") == Target(("localhost:1",), is_watched=False)


def test_several_are_listed_or_have_a_name() -> None:
    assert read_target("quill://a:1,[::1]:2") == Target(("a:1", "[::1]:2"))
    assert read_target("quill+dns://quill.default:50051") == Target(name="quill.default:50051")
    assert read_target("quill://a:1?balance=least") == Target(("a:1",), balance="least")
    assert read_target("quill+dns://a:1?balance=round-robin").balance == "round-robin"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("quill://", "isn't HOST:PORT"),
        ("quill://a", "'a' isn't HOST:PORT"),
        ("quill://a:1,", "'' isn't HOST:PORT"),
        ("quill://a:1,b:0", "ports are from 1 to 65535"),
        ("quill://a:1,b:2,a:1", "twice"),
        ("quill+dns://a:1,b:2", "'a:1,b:2' isn't HOST:PORT"),
        ("quill://a:1?balance=best", r"isn't known.*\?balance=affinity"),
        ("quill://a:1?least", "isn't known"),
    ],
)
def test_what_names_no_servers_is_refused_in_words(given: str, reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        read_target(given)
    with pytest.raises(argparse.ArgumentTypeError, match=reason):
        addresses(given)


def test_commands_that_ask_take_several_and_those_that_operate_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    several = "quill://a:1,b:1"
    for words in (
        ["generate", "hi"],
        ["chat"],
        ["embed", "hi"],
        ["fill-mask", "hi"],
        ["batch", "i", "o"],
    ):
        args = build_parser().parse_args([*words, "--address", several])
        assert args.address == several
    for words in (["health"], ["reload"]):
        with pytest.raises(SystemExit):
            build_parser().parse_args([*words, "--address", several])
        assert "this command calls one server" in capsys.readouterr().err


def test_name_is_looked_up_to_all_its_addresses() -> None:
    assert "127.0.0.1:7" in resolve("localhost:7")
    with pytest.raises(OSError, match=r"."):
        resolve("nowhere.invalid:7")

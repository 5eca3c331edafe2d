"""Connections that come to nothing: each mix-up is told apart, and says which option to use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access
from quill.server.client.errors import CallError, diagnose
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.authority import Authority, trusting, write
from tests.server.breaking_server import HANG_UP, breaking_server
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

FAILED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1"
OURS, THEIRS = Authority("ours"), Authority("theirs")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Wants TLS, and certificates signed by THEIRS; reached by more names than its own has."""
    files = write(tmp_path_factory.mktemp("tls"), OURS.sign("server"), client_ca=THEIRS.cert)
    with running_server(tls=files, host="0.0.0.0", metrics_port=0) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with running_server(metrics_port=0) as running:
        yield running


def failure(address: str, access: Access) -> CallError:
    with (
        Client(address, Retries(max_retries=0), access=access) as client,
        pytest.raises(CallError) as caught,
    ):
        client.model(timeout_s=TIMEOUT_S)
    return caught.value


@pytest.mark.parametrize(
    ("access", "advice", "is_lasting"),
    [
        (Access(), "give --ca or --tls", False),
        (trusting(OURS), "give --cert and --key", False),
        (trusting(OURS, OURS.sign("stranger")), "signed by an authority of the server's", False),
        (trusting(THEIRS), "isn't trusted by the authority in --ca: unable to get", True),
        (Access(tls=True), "isn't trusted by this machine's authorities: unable to get", True),
        (Access(ca=b"nonsense"), "must be a PEM file", True),
    ],
)
def test_server_with_tls_says_what_it_wants(
    strict: Running, access: Access, advice: str, is_lasting: bool
) -> None:
    error = failure(f"127.0.0.1:{strict.server.port}", access)
    assert advice in str(error)
    assert error.is_lasting is is_lasting


def test_certificate_for_another_name_is_called_that(strict: Running) -> None:
    access = trusting(OURS, THEIRS.sign("friend"))
    assert "for another name" in str(failure(f"127.0.0.2:{strict.server.port}", access))


def test_tls_to_a_server_without_it_is_to_be_left_out(plain: Running) -> None:
    error = failure(plain.address, trusting(OURS))
    assert "doesn't use TLS. Leave out" in str(error)
    assert error.is_lasting


def test_port_for_metrics_is_not_taken_for_a_server(plain: Running) -> None:
    error = failure(f"127.0.0.1:{plain.server.metrics_port}", Access())
    assert "isn't a gRPC server" in str(error)


def test_address_where_nobody_listens_asks_whether_a_server_runs() -> None:
    error = failure("127.0.0.1:1", Access())
    assert str(error).startswith("no server answers: ipv4:127.0.0.1:1: ")
    assert "Is one running?" in str(error)
    assert not error.is_lasting


@pytest.mark.parametrize(
    ("details", "was_reached", "reason"),
    [
        (
            "errors resolving nowhere.invalid:1: [Domain name not found]",
            False,
            "the host name can't be resolved: errors resolving nowhere.invalid:1: "
            "[Domain name not found]",
        ),
        (f"{FAILED}: Connection refused", True, "no server answers: ipv4:1: Connection refused"),
        (f"{FAILED}: Socket closed", True, "the server closed the connection: ipv4:1: Socket clo"),
    ],
)
def test_what_is_known_is_told_without_advice_on_options_that_have_worked(
    details: str, was_reached: bool, reason: str
) -> None:
    found = diagnose(details, Access(), was_reached=was_reached)
    assert found is not None
    assert found.reason.startswith(reason)
    assert "TLS" not in found.reason
    assert "running?" not in found.reason
    assert not found.is_lasting


def test_connection_that_breaks_during_a_call_is_not_blamed_on_tls() -> None:
    with breaking_server([pb.Model()], HANG_UP) as server:
        error = failure(server.address, Access())
    assert error.is_broken
    assert str(error).startswith("the connection broke during the call: ")
    assert "TLS" not in str(error)


@pytest.mark.parametrize("command", [("generate", "abc"), ("chat",), ("embed", "abc")])
def test_command_whose_server_was_never_up_fails_at_once_in_one_line(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    address = ("--address", "127.0.0.1:1", "--timeout", "120")
    assert main([*command, *address]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("quill: no server answers: ")
    assert "Connection refused" in errors
    assert errors.count("\n") == 1


def test_what_a_server_says_itself_is_left_alone() -> None:
    assert diagnose("the server is loading its model", Access()) is None


def test_lasting_mix_up_is_told_at_once_in_one_line(
    plain: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ca.pem").write_bytes(OURS.cert)
    options = ["--address", plain.address, "--ca", str(tmp_path / "ca.pem")]
    assert main(["generate", *options, "abc"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("quill: the server doesn't use TLS")
    assert errors.count("\n") == 1

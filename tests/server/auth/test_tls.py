"""TLS as clients meet it: who is answered, and that a new certificate drops nobody."""

import asyncio
import logging
import socket
import ssl
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from quill.__main__ import main
from quill.server.auth.tls import certificate_expiry, server_credentials
from quill.server.client.access import Access
from quill.server.client.async_client import AsyncClient
from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from quill.server.errors import StartError
from quill.server.settings import TlsFiles
from tests.server.authority import Authority, Signed, locked, trusting, write
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

NEVER = Retries(max_retries=0)


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority("ours")


@pytest.fixture(scope="module")
def theirs() -> Authority:
    return Authority("theirs")


@pytest.fixture(scope="module")
def signed(ours: Authority) -> Signed:
    return ours.sign("server")


def ask(running: Running, access: Access) -> str:
    with Client(running.address, NEVER, access=access) as client:
        answer = client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
        return answer.sequences[0].text


def refusal(running: Running, access: Access) -> grpc.StatusCode:
    with pytest.raises(CallError) as caught:
        ask(running, access)
    return caught.value.code


def test_clients_that_trust_the_authority_are_answered(
    ours: Authority, theirs: Authority, signed: Signed, tmp_path: Path
) -> None:
    async def ask_async() -> str:
        async with AsyncClient(running.address, NEVER, access=trusting(ours)) as client:
            answer = await client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
            return answer.sequences[0].text

    with running_server(tls=write(tmp_path, signed)) as running:
        assert ask(running, trusting(ours)) == "de"
        assert asyncio.run(ask_async()) == "de"
        assert refusal(running, trusting(theirs)) is grpc.StatusCode.UNAVAILABLE
        assert refusal(running, Access()) is grpc.StatusCode.UNAVAILABLE


def test_front_door_takes_the_authority_as_a_file(
    ours: Authority, signed: Signed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ca.pem").write_bytes(ours.cert)
    with running_server(tls=write(tmp_path, signed)) as running:
        address = ["--address", running.address, "--ca", str(tmp_path / "ca.pem")]
        assert main(["generate", *address, "abc", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.endswith("de\n")


def test_with_a_client_authority_only_its_clients_are_answered(
    ours: Authority, theirs: Authority, signed: Signed, tmp_path: Path
) -> None:
    with running_server(tls=write(tmp_path, signed, client_ca=theirs.cert)) as running:
        assert ask(running, trusting(ours, theirs.sign("friend"))) == "de"
        assert refusal(running, trusting(ours)) is grpc.StatusCode.UNAVAILABLE
        stranger = trusting(ours, ours.sign("stranger"))
        assert refusal(running, stranger) is grpc.StatusCode.UNAVAILABLE


def test_new_certificate_serves_new_connections_and_streams_go_on(
    ours: Authority, theirs: Authority, signed: Signed, tmp_path: Path
) -> None:
    with running_server(tls=write(tmp_path, signed)) as running:
        running.session.hold()
        with Client(running.address, NEVER, access=trusting(ours)) as early:
            chunks = early.stream("abc", max_new_tokens=20, timeout_s=TIMEOUT_S)
            running.session.let_go(1)
            text = next(chunks).text
            write(tmp_path, theirs.sign("server"))
            running.session.let_go()
            assert ask(running, trusting(theirs)) == "de"
            assert refusal(running, trusting(ours)) is grpc.StatusCode.UNAVAILABLE
            assert text + "".join(chunk.text for chunk in chunks) == "defghijklmnopqrstuvw"


def test_new_client_authority_counts_for_new_connections(
    ours: Authority, theirs: Authority, signed: Signed, tmp_path: Path
) -> None:
    friend = trusting(ours, theirs.sign("friend"))
    with running_server(tls=write(tmp_path, signed, client_ca=theirs.cert)) as running:
        assert ask(running, friend) == "de"
        write(tmp_path, signed, client_ca=ours.cert)
        assert refusal(running, friend) is grpc.StatusCode.UNAVAILABLE


def test_bad_replacement_is_logged_and_the_old_certificate_stays(
    ours: Authority, signed: Signed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(tls=write(tmp_path, signed)) as running:
        write(tmp_path, Signed(signed.cert, ours.sign("another").key))
        with caplog.at_level(logging.ERROR):
            assert ask(running, trusting(ours)) == "de"
        assert "the last good one stays" in caplog.text
        assert "PRIVATE KEY" not in caplog.text
        write(tmp_path, ours.sign("renewed"))
        assert ask(running, trusting(ours)) == "de"


def test_files_that_dont_belong_together_are_refused_at_start(
    ours: Authority, signed: Signed, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match="belong together"):
        server_credentials(write(tmp_path, Signed(signed.cert, ours.sign("another").key)))
    with pytest.raises(StartError, match="password"):
        server_credentials(write(tmp_path, Signed(signed.cert, locked(signed.key, b"secret"))))
    with pytest.raises(StartError, match="--client-ca"):
        server_credentials(write(tmp_path, signed, client_ca=b"nonsense"))
    with pytest.raises(StartError, match="can't use the certificate"):
        server_credentials(TlsFiles(cert=tmp_path / "nowhere", key=tmp_path / "nowhere"))


def test_metrics_use_the_same_certificate_and_a_silent_caller_blocks_nobody(
    ours: Authority, signed: Signed, tmp_path: Path
) -> None:
    context = ssl.create_default_context(cadata=ours.cert.decode())
    with running_server(tls=write(tmp_path, signed), metrics_port=0) as running:
        port = running.server.metrics_port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port)):
            url = f"https://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, context=context, timeout=TIMEOUT_S) as reply:
                assert b"quill_max_num_seqs 4.0" in reply.read()


def test_crowd_of_silent_callers_takes_only_so_many_threads(
    ours: Authority, signed: Signed, tmp_path: Path
) -> None:
    with running_server(tls=write(tmp_path, signed), metrics_port=0) as running:
        address = ("127.0.0.1", running.server.metrics_port or 0)
        before = threading.active_count()
        callers = [socket.create_connection(address, TIMEOUT_S) for _ in range(60)]
        # All that came too late are hung up on; then all that came in time have their threads.
        assert sum(_was_hung_up(each) for each in callers[16:]) == 44
        assert threading.active_count() - before <= 16
        for each in callers:
            each.close()


def _was_hung_up(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def test_expiry_is_that_of_the_certificate_that_serves(ours: Authority, tmp_path: Path) -> None:
    files = write(tmp_path, ours.sign("localhost"))
    expiry = certificate_expiry(files)
    cert = x509.load_pem_x509_certificate(files.cert.read_bytes())
    assert expiry.get() == cert.not_valid_after_utc.timestamp()
    files.cert.write_bytes(b"nonsense")
    assert expiry.get() == cert.not_valid_after_utc.timestamp()


@pytest.mark.parametrize(("mode", "num_warnings"), [(0o640, 0), (0o644, 1)])
def test_key_that_everybody_can_read_is_a_warning(
    mode: int, num_warnings: int, ours: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = write(tmp_path, ours.sign("localhost"))
    files.key.chmod(mode)
    server_credentials(files)
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    assert [each.getMessage().count(str(files.key)) for each in warnings] == [2] * num_warnings


@pytest.mark.parametrize(
    ("mode", "is_remarked_on"), [(0o600, False), (0o640, False), (0o644, True)]
)
def test_key_that_every_user_can_read_is_remarked_on(
    signed: Signed,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    mode: int,
    is_remarked_on: bool,
) -> None:
    files = write(tmp_path, signed)
    files.key.chmod(mode)
    server_credentials(files)
    assert (f"chmod o-r {files.key}" in caplog.text) == is_remarked_on

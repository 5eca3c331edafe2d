"""`quill top`: the metrics of all servers in the terminal, again and again.

Knows: terminals, clocks, where a server's metrics are. Does not know: what the metrics mean.

A server is given by any of its ports: the HTTP and metrics ports have /metrics, and the port after
the gRPC port is the metrics port, unless somebody chose otherwise.
"""

import argparse
import contextlib
import http.client
import shutil
import ssl
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quill.server.addresses import MAX_PORT, METRICS_OFFSET, write_address
from quill.server.client.access import Access, read_access
from quill.server.client.target import read_target, resolve
from quill.server.client.tools.http_client import HttpClient, split_address
from quill.server.client.tools.top_table import LEGEND, Row, Window, table
from quill.server.errors import ServerError
from quill.server.prometheus_text import Samples, read_samples

TIMEOUT_S = 2.0
RATE_S, WINDOW_S = 5.0, 60.0  # how far back rates go; ratios and quantiles
_TOKENS = "quill_generation_tokens_total"
_HOME, _CLEAR, _CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"
_OPEN, _CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, no cursor


class NoneServesError(ServerError):
    """No server that was given serves."""


class ScrapeError(ServerError):
    """A server has no metrics at these ports."""


@dataclass(frozen=True)
class Scrape:
    at_s: float
    samples: Samples


class Scraper:
    """Of one server. Remembers which of its ports has the metrics, and the last minute's."""

    def __init__(self, address: str, access: Access, name: str = "") -> None:
        """`name`: what the server's certificate is for, if that isn't the host."""
        host, port = split_address(address)
        tls = access.http_context() if access.uses_tls else None
        headers = dict(access.metadata) if tls or access.may_show_key(host) else {}
        ports = [each for each in (port, port + METRICS_OFFSET) if each <= MAX_PORT]
        self.address = address
        self._clients = [
            HttpClient(write_address(host, each), tls, headers, name) for each in ports
        ]
        self._scrapes: deque[Scrape] = deque()

    def scrape(self) -> Row:
        try:
            now = Scrape(time.monotonic(), self._fetch())
        except ScrapeError as error:
            self._scrapes.clear()  # a server that comes back may be another one
            return Row(self.address, None, str(error))
        scrapes = self._scrapes
        if scrapes and now.samples.value(_TOKENS) < scrapes[-1].samples.value(_TOKENS):
            scrapes.clear()  # the server was restarted
        scrapes.append(now)
        while scrapes[0].at_s < now.at_s - WINDOW_S:
            scrapes.popleft()
        recent = next(each for each in scrapes if each.at_s >= now.at_s - RATE_S)
        # After a minute, that minute; until then all since the server's start.
        is_full = now.at_s - scrapes[0].at_s > WINDOW_S - 2 * RATE_S
        old = scrapes[0].samples if is_full else Samples(())
        return Row(self.address, Window(now.samples, recent.samples, now.at_s - recent.at_s, old))

    def _fetch(self) -> Samples:
        problem = ""
        for client in self._clients:
            try:
                samples = _read(client)
            except ScrapeError as error:
                problem = problem or str(error)
            except (OSError, http.client.HTTPException) as error:
                problem = problem or _reason(error)
            else:
                self._clients = [client]
                return samples
        raise ScrapeError(problem)


def _read(client: HttpClient) -> Samples:
    try:
        response = client.request("GET", "/metrics", timeout_s=TIMEOUT_S)
    finally:
        client.close()
    if response.status == http.client.UNAUTHORIZED:
        raise ScrapeError(
            "requires an API key: give --api-key-file, or start the server with "
            "--allow-unauthenticated metrics"
        )
    if response.status != http.client.OK:
        raise ScrapeError(f"responds with {response.status} {response.reason}")
    samples = read_samples(response.content.decode("utf-8", "replace"))
    if "quill_serving" not in samples:
        raise ScrapeError("what listens there isn't a Quill server")
    return samples


def _reason(error: OSError | http.client.HTTPException) -> str:
    match error:
        case ConnectionRefusedError():
            return "down: nothing listens there"
        case TimeoutError():
            return f"down: no response for {TIMEOUT_S:g} s"
        case ssl.SSLError():
            return f"TLS fails: {getattr(error, 'verify_message', '') or error.reason}"
        case http.client.HTTPException() | ConnectionResetError():
            return "no metrics there, nor at the next port. Is it gRPC, or TLS without --ca?"
    return f"down: {error.strerror or error}"


class Board:
    """All servers behind the addresses, also those that join later."""

    def __init__(self, addresses: Sequence[str], access: Access) -> None:
        self._addresses = addresses
        self._access = access
        self._scrapers: dict[str, Scraper] = {}

    def scrape(self) -> list[Row]:
        """All servers at once: one that doesn't respond delays no other."""
        rows: list[Row] = []
        scrapers: list[Scraper] = []
        for address in self._addresses:
            target = read_target(address)
            try:
                servers = target.servers if target.name is None else resolve(target.name)
            except OSError as error:
                rows.append(Row(address, None, f"has no address: {error.strerror}"))
                continue
            name = "" if target.name is None else split_address(target.name)[0]
            for server in servers:
                if server not in self._scrapers:
                    self._scrapers[server] = Scraper(server, self._access, name)
                scrapers.append(self._scrapers[server])
        with ThreadPoolExecutor(max(1, len(scrapers))) as threads:
            return [*threads.map(Scraper.scrape, scrapers), *rows]


def top(args: argparse.Namespace) -> None:
    board = Board(args.addresses or [args.default_address], read_access(args))
    board.scrape()
    if args.once:
        time.sleep(args.interval)  # rates are between two scrapes
        rows = board.scrape()
        print(*table(rows), sep="\n")
        if not any(row.is_serving for row in rows):
            raise NoneServesError("no server serves")
        return
    with _screen():
        while True:
            time.sleep(args.interval)
            _show(table(board.scrape()))


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    if not sys.stdout.isatty():
        yield
        return
    print(_OPEN, end="", flush=True)
    try:
        yield
    except KeyboardInterrupt:
        pass  # how one leaves
    finally:
        print(_CLOSE, end="", flush=True)


def _show(lines: Sequence[str]) -> None:
    """In place of the last table, or below it where stdout isn't a terminal."""
    now = time.strftime("%H:%M:%S")
    if not sys.stdout.isatty():
        print(now, *lines, "", sep="\n", flush=True)
        return
    size = shutil.get_terminal_size()
    shown = [*lines, "", f"{now}  Ctrl-C leaves  {LEGEND}"][: size.lines - 1]
    cut = [f"{line[: size.columns]}{_CLEAR_LINE}\n" for line in shown]
    print(_HOME, *cut, _CLEAR, sep="", end="", flush=True)

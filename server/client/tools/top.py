"""`quill top`: the metrics of all servers in the terminal, again and again.

Knows: terminals, clocks, where a server's metrics are, their names. Does not know: requests.

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from quill.server.addresses import MAX_PORT, METRICS_OFFSET, write_address
from quill.server.client.access import Access, read_access
from quill.server.client.target import read_target, resolve
from quill.server.client.tools.http_client import HttpClient, split_address
from quill.server.errors import ServerError
from quill.server.prometheus_text import Samples, read_samples

TIMEOUT_S = 2.0
RATE_S, WINDOW_S = 5.0, 60.0  # how far back rates go; ratios and quantiles
_TOKENS = "quill_generation_tokens_total"
_HOME, _CLEAR, _CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"
_OPEN, _CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, no cursor
HEADS = (
    *("server", "health", "running", "waiting", "tokens/s", "TTFT", "ITL"),
    *("KV cache", "prefix hits", "drafts accepted"),
)
LEGEND = (
    "TTFT, ITL: time to first token and between tokens, median / p95; with prefix hits and drafts "
    "accepted of the last minute"
)
_NOTHING = "–"

Buckets = Mapping[float, float]  # observations up to each bound


@dataclass(frozen=True)
class Window:
    """A server's metrics: now, `seconds` ago for rates, and a minute ago for all else."""

    now: Samples
    recent: Samples
    seconds: float
    old: Samples


@dataclass(frozen=True)
class Row:
    """A server that responds has a window; of another one the problem is known."""

    address: str
    window: Window | None
    problem: str = ""

    @property
    def is_serving(self) -> bool:
        return self.window is not None and bool(self.window.now.value("quill_serving"))


def table(rows: Sequence[Row]) -> list[str]:
    """The heads, a line for each server, and one for all if there are several."""
    cells = [list(HEADS)]
    for row in rows:
        if row.window is None:
            cells.append([row.address, row.problem])
        else:
            health = "serving" if row.is_serving else "not serving"
            cells.append([row.address, health, *columns([row.window])])
    if len(rows) > 1:
        health = f"{sum(row.is_serving for row in rows)} of {len(rows)} serve"
        windows = [row.window for row in rows if row.window is not None]
        cells.append(["all", health, *columns(windows)])
    return _aligned(cells)


def columns(windows: Sequence[Window]) -> list[str]:
    """Of these servers together."""

    def gauge(name: str) -> float:
        return sum(each.now.value(f"quill_{name}") for each in windows)

    def increase(name: str) -> float:
        name = f"quill_{name}_total"
        return sum(each.now.value(name) - each.old.value(name) for each in windows)

    def ratio(part: float, whole: float) -> str:
        return f"{part / whole:.0%}" if whole > 0 else _NOTHING

    tokens_per_s = sum(
        (each.now.value(_TOKENS) - each.recent.value(_TOKENS)) / each.seconds
        for each in windows
        if each.seconds > 0
    )
    hits = increase("prefix_cache_hits")
    return [
        f"{gauge('sequences_running'):g}/{gauge('max_num_seqs'):g}",
        f"{gauge('requests_waiting'):g}",
        f"{tokens_per_s:,.{0 if tokens_per_s >= 10 else 1}f}",
        _quantiles(buckets(windows, "quill_time_to_first_token_seconds")),
        _quantiles(buckets(windows, "quill_inter_token_latency_seconds")),
        ratio(gauge("kv_blocks_used"), gauge("kv_blocks")),
        ratio(hits, hits + increase("prefix_cache_misses")),
        ratio(increase("spec_accepted_tokens"), increase("spec_draft_tokens")),
    ]


def buckets(windows: Sequence[Window], name: str) -> Buckets:
    """A histogram's increase, of all servers together."""
    found: dict[float, float] = {}
    for window in windows:
        old = window.old.buckets(name)
        for bound, count in window.now.buckets(name).items():
            found[bound] = found.get(bound, 0.0) + count - old.get(bound, 0.0)
    return dict(sorted(found.items()))


def quantile(buckets: Buckets, q: float) -> float | None:
    """Interpolated within a bucket, as Prometheus does. None: there are no observations."""
    bounds = list(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = q * buckets[bounds[-1]]
    below, least = 0.0, 0.0
    for bound in bounds[:-1]:
        if buckets[bound] >= wanted:
            return least + (wanted - below) / (buckets[bound] - below) * (bound - least)
        below, least = buckets[bound], bound
    return least  # beyond the last bound


def _quantiles(buckets: Buckets) -> str:
    both = [quantile(buckets, q) for q in (0.5, 0.95)]
    return " / ".join(_duration(each) for each in both if each is not None) or _NOTHING


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    ms = 1000 * seconds
    return f"{ms:.{0 if ms >= 10 else 1}f} ms"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right. A problem extends over the columns after it."""
    whole = [each for each in cells if len(each) == len(HEADS)]
    widths = [max(len(each[column]) for each in whole) for column in range(len(HEADS))]
    widths[0] = max(len(each[0]) for each in cells)
    sides = ("<", "<", *(">" for _ in HEADS[2:]))
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(each, sides, widths, strict=False)
        ).rstrip()
        for each in cells
    ]


class ScrapeError(ServerError):
    """A server has no metrics at these ports."""


class Scrape(NamedTuple):
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
        """From the first port that has metrics; the first port's error if none has."""
        problems = []
        for client in self._clients:
            try:
                samples = _read(client)
            except (ScrapeError, OSError, http.client.HTTPException) as error:
                problems.append(_reason(error))
            else:
                self._clients = [client]
                return samples
        raise ScrapeError(problems[0])


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


def _reason(error: ScrapeError | OSError | http.client.HTTPException) -> str:
    match error:
        case ScrapeError():
            return str(error)
        case ConnectionRefusedError():
            return "down: nothing listens there"
        case TimeoutError():
            return f"down: no response for {TIMEOUT_S:g} s"
        case ssl.SSLError():
            return f"TLS fails: {getattr(error, 'verify_message', '') or error.reason}"
        case http.client.HTTPException() | ConnectionResetError():
            return "no metrics there, nor at the next port. Is it gRPC, or TLS without --ca?"
        case OSError():
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
            raise ServerError("no server serves")
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

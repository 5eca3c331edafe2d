"""`quill top`: all servers, as they are now, again and again.

Knows: terminals, clocks, which looks to compare. Does not know: HTTP, what the numbers mean.
"""

import argparse
import contextlib
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from quill.server.addresses import write_address
from quill.server.client.access import Access, read_access
from quill.server.client.target import read_target, resolve
from quill.server.client.top.numbers import numbers
from quill.server.client.top.page import Look, Page, PageError, Place
from quill.server.client.top.table import Row, table
from quill.server.errors import ServerError

RATE_S, WINDOW_S = 5.0, 60.0  # how far back rates go; shares and quantiles
_HOME, _CLEAR, _CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"
_OPEN, _CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of its own, no cursor


class NobodyServesError(ServerError):
    """Of all servers that were named."""


class Watched:
    """One server, and what it said lately."""

    def __init__(self, address: str, page: Page) -> None:
        self.address = address
        self._page = page
        self._looks: deque[Look] = deque()

    def look(self) -> Row:
        try:
            now = self._page.look()
        except PageError as error:
            self._looks.clear()  # whoever comes back may be another one
            return Row(self.address, None, str(error))
        made = "quill_generation_tokens_total"
        if self._looks and now.value(made) < self._looks[-1].value(made):
            self._looks.clear()  # it began anew
        self._looks.append(now)
        while self._looks[0].at_s < now.at_s - WINDOW_S:
            self._looks.popleft()
        return Row(self.address, numbers(now, self._before(RATE_S), self._old()))

    def _before(self, span_s: float) -> Look | None:
        now = self._looks[-1]
        return next(
            (each for each in self._looks if now.at_s - span_s <= each.at_s < now.at_s), None
        )

    def _old(self) -> Look | None:
        """After a minute, that minute; until then all that the server has ever done."""
        first, last = self._looks[0], self._looks[-1]
        return first if last.at_s - first.at_s > WINDOW_S - 2 * RATE_S else None


class Board:
    """All servers that the addresses name, also those that join later."""

    def __init__(self, addresses: Sequence[str], access: Access) -> None:
        self._addresses = addresses
        self._access = access
        self._watched: dict[Place, Watched] = {}

    def look(self) -> list[Row]:
        """At all of them at once: one that doesn't answer delays no other by more than its time."""
        rows: list[Row] = []
        there: list[Watched] = []
        for address in self._addresses:
            try:
                there += map(self._watch, _places(address))
            except PageError as error:
                rows.append(Row(address, None, str(error)))
        with ThreadPoolExecutor(max(1, len(there))) as threads:
            return [*threads.map(Watched.look, there), *rows]

    def _watch(self, place: Place) -> Watched:
        if place not in self._watched:
            address = write_address(place.host, place.port)
            self._watched[place] = Watched(address, Page(place, self._access))
        return self._watched[place]


def _places(address: str) -> list[Place]:
    target = read_target(address)
    if target.name is None:
        return [_place(each) for each in target.servers]
    try:
        servers = resolve(target.name)
    except OSError as error:
        raise PageError(f"has no address: {error.strerror}") from error
    return [_place(each, target.name.rpartition(":")[0]) for each in servers]


def _place(server: str, name: str = "") -> Place:
    host, _, port = server.rpartition(":")
    return Place(host.removeprefix("[").removesuffix("]"), int(port), name)


def top(args: argparse.Namespace) -> None:
    board = Board(args.addresses or [args.default_address], read_access(args))
    board.look()
    if args.once:
        time.sleep(args.interval)  # rates are between two looks
        rows = board.look()
        print(*table(rows), sep="\n")
        if not any(row.numbers is not None and row.numbers.serving for row in rows):
            raise NobodyServesError("no server serves")
        return
    with _screen():
        while True:
            time.sleep(args.interval)
            _show(table(board.look()))


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
    """Over what was there, or below it where that can't be."""
    now = time.strftime("%H:%M:%S")
    if not sys.stdout.isatty():
        print(now, *lines, "", sep="\n", flush=True)
        return
    size = shutil.get_terminal_size()
    said = "first token and gap: median / 95%, of the last minute, as hits and guesses are"
    notes = ["", f"{now}  Ctrl-C leaves  {said}"]
    shown = [*lines, *notes][: size.lines - 1]
    cut = [f"{line[: size.columns]}{_CLEAR_LINE}\n" for line in shown]
    print(_HOME, *cut, _CLEAR, sep="", end="", flush=True)

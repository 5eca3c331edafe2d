"""A browser, and servers to look at with it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.server.process import server_process
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

Open = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium here to look at the page with (Debian: chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address. At the end nothing else than `expected` may have been complained of, and
    nothing asked of others. Name it after the server's fixture: pages must be gone before it."""
    complaints: list[str] = []
    hosts: set[str] = set()
    own: set[str] = set()
    with ExitStack() as stack:

        def open_at(url: str, expected: str | None = None, **context: Any) -> Page:
            own.add(urlsplit(url).netloc)
            page = stack.enter_context(browser.new_context(**context)).new_page()
            page.set_default_timeout(1000 * TIMEOUT_S)

            def complain(text: str) -> None:
                if expected is None or expected not in text:
                    complaints.append(text)

            page.on("console", lambda message: complain(message.text))
            page.on("pageerror", lambda error: complain(str(error)))
            page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
            page.goto(url)
            page.wait_for_selector("#model:not(:text('connecting'))")
            return page

        yield open_at
    assert not complaints
    assert hosts <= own


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server with a small network, which babbles."""
    from tests.server.tiny_bundle import make_talker

    directory = tmp_path_factory.mktemp("talker")
    make_talker(directory / "talker")
    with address_of(directory / "talker", directory / "log") as url:
        yield url


@pytest.fixture
def reciter() -> Iterator[Running]:
    """A server whose steps wait for the test."""
    with running_server(http_port=0) as running:
        yield running


@contextmanager
def address_of(bundle: Path, log: Path) -> Iterator[str]:
    """Serves a bundle, and says where its page is."""
    with server_process(bundle, log) as server:
        yield server.log.partition("HTTP at ")[2].split()[0]

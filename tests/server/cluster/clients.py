"""Clients that call a cluster, and compare its answers with a single server's."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from quill.server.client.access import Access
from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.cluster.running_cluster import RunningCluster
from tests.server.process import wait_until

PROMPT = "Once upon a time"
NEVER = Retries(max_retries=0)
PATIENT = Retries(max_retries=20, max_s=2.0)
NUM_TOKENS = 48
TIMEOUT_S = 120.0


def text_of(client: Client, seed: int, num_tokens: int = NUM_TOKENS, **options: Any) -> str:
    chunks = client.stream(
        PROMPT, seed=seed, max_new_tokens=num_tokens, timeout_s=TIMEOUT_S, **options
    )
    return "".join(chunk.text for chunk in chunks)


class Clients:
    """They call again and again until `end`."""

    def __init__(
        self, address: str, access: Access, texts: dict[int, str], retries: Retries
    ) -> None:
        self._address, self._access, self._texts, self._retries = address, access, texts, retries
        self.num_answers = 0
        self.errors: list[str] = []
        self._ended = threading.Event()

    def run(self, number: int) -> None:
        seed = number
        with Client(self._address, self._retries, access=self._access) as client:
            while not self._ended.is_set():
                seed = (seed + 1) % len(self._texts)
                try:
                    found = text_of(client, seed, resume=self._retries is PATIENT)
                except CallError as error:
                    self.errors.append(f"{error.code} {error.reason}")
                    continue
                if found != self._texts[seed]:
                    self.errors.append(f"{seed}: {found!r}, not {self._texts[seed]!r}")
                self.num_answers += 1

    def end(self) -> None:
        self._ended.set()


@contextmanager
def calling_clients(
    cluster: RunningCluster,
    access: Access,
    texts: dict[int, str],
    number: int,
    retries: Retries = NEVER,
) -> Iterator[None]:
    """Every answer is right, before, during and after the block, and no call fails."""
    clients = Clients(cluster.address, access, texts, retries)
    with ThreadPoolExecutor(number) as threads:
        calling = [threads.submit(clients.run, each) for each in range(number)]
        try:
            wait_until(lambda: clients.num_answers >= number, "an answer for each", TIMEOUT_S)
            yield
            before = clients.num_answers
            wait_until(lambda: clients.num_answers >= before + number, "more answers", TIMEOUT_S)
        finally:
            clients.end()
    for each in calling:
        each.result()
    assert not clients.errors, clients.errors

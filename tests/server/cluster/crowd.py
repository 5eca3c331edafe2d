"""People who ask a cluster and notice every difference from a single server's answers."""

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


class Crowd:
    """Clients that ask and ask, and notice every difference."""

    def __init__(
        self, address: str, access: Access, texts: dict[int, str], retries: Retries
    ) -> None:
        self._ask = (address, access, texts, retries)
        self.num_answers = 0
        self.complaints: list[str] = []
        self._ended = threading.Event()

    def run(self, number: int) -> None:
        address, access, texts, retries = self._ask
        seed = number
        with Client(address, retries, access=access) as client:
            while not self._ended.is_set():
                seed = (seed + 1) % len(texts)
                try:
                    found = text_of(client, seed, resume=retries is PATIENT)
                    if found != texts[seed]:
                        self.complaints.append(f"{seed}: {found!r}, not {texts[seed]!r}")
                    self.num_answers += 1
                except CallError as error:
                    self.complaints.append(f"{error.code} {error.reason}")

    def end(self) -> None:
        self._ended.set()


@contextmanager
def crowd(
    cluster: RunningCluster,
    access: Access,
    texts: dict[int, str],
    number: int,
    retries: Retries = NEVER,
) -> Iterator[Crowd]:
    """At the end nobody may have complained."""
    people = Crowd(cluster.address, access, texts, retries)
    with ThreadPoolExecutor(number) as threads:
        asking = [threads.submit(people.run, each) for each in range(number)]
        try:
            wait_until(lambda: people.num_answers >= number, "an answer for each", TIMEOUT_S)
            yield people
            so_far = people.num_answers
            wait_until(lambda: people.num_answers >= so_far + number, "answers after", TIMEOUT_S)
        finally:
            people.end()
    for each in asking:
        each.result()
    assert not people.complaints, people.complaints

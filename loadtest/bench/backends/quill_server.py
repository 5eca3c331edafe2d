"""`quill serve`, several of them, or a cluster as a backend, with streaming clients.

    python -m quill.loadtest.bench.backends.quill_server '{"bundle": …, "options": […], …}'

Knows: how they are started, Quill's protocols. Does not know: other backends.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from quill.loadtest.bench.backends.protocol import BackendInfo, serve
from quill.loadtest.environment.process import peak_bytes_of
from quill.loadtest.environment.server import (
    HTTP_OFFSET,
    StartedServer,
    offset_port,
    start_cluster,
    start_server,
)
from quill.loadtest.errors import BackendError
from quill.loadtest.protocols.connect import connect
from quill.loadtest.protocols.grpc import CallError, GrpcClient, ProtocolClient
from quill.loadtest.protocols.names import ProtocolName
from quill.loadtest.workload.closed_loop import (
    ANSWER_TIMEOUT_S,
    IsOver,
    Streamed,
    run_load,
    run_users,
)
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access


@dataclass(frozen=True)
class ServerConfig:
    bundle: str = ""
    options: tuple[str, ...] = ()  # of `quill serve` or `quill cluster up`
    python: str = sys.executable  # another checkout's
    num_servers: int = 1  # users take them in turns
    cluster: bool = False
    address: str = ""  # of a server that runs already, with any options

    def command(self, module: str = "quill_server") -> list[str]:
        """The backend's command line."""
        path = f"quill.loadtest.bench.backends.{module}"
        return [sys.executable, "-m", path, json.dumps(asdict(self))]


class QuillServer:
    def __init__(self, config: ServerConfig, stack: ExitStack) -> None:
        self._stack = stack
        self._servers = self._start(config)
        with closing(GrpcClient(self._servers[0].address)) as client:
            model = client.get_model()
        self.info = BackendInfo("Quill", model.precision, model.server_version, 0)
        self._clients: dict[str, list[ProtocolClient]] = {}

    @property
    def address(self) -> str:
        return self._servers[0].address

    def _start(self, config: ServerConfig) -> list[StartedServer]:
        if config.address:
            http = offset_port(config.address, HTTP_OFFSET)
            return [StartedServer(config.address, None, http, 0)]
        logs, bundle = Path(self._stack.enter_context(tempfile.TemporaryDirectory())), config.bundle
        if config.cluster:
            started = start_cluster(logs / "cluster.log", Path(bundle), *config.options)
            return [StartedServer(self._stack.enter_context(started), None, None, 0)]
        return [
            self._stack.enter_context(
                start_server(
                    logs / f"server-{i}.log", Path(bundle), *config.options, python=config.python
                )
            )
            for i in range(config.num_servers)
        ]

    def load(
        self,
        prompts: Sequence[Sequence[int]],
        num_users: int,
        num_new: int,
        duration_s: float,
        temperature: float = 0.0,
        protocol: ProtocolName = "grpc",
    ) -> dict[str, Any]:
        streams = cycle(
            [_streaming(each, num_new, temperature) for each in self._connect(protocol)]
        )
        return run_load(lambda ids: next(streams)(ids), prompts, num_users, num_new, duration_s)

    def generate(
        self,
        sources: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        num_beams: int,
        num_users: int,
    ) -> dict[str, Any]:
        """Greedy answers, or the best of so many beams, to all sources."""
        answers, texts = [[0]] * len(sources), [""] * len(sources)
        numbers = iter(range(len(sources)))  # each step of it is atomic
        (client,) = self._connect("grpc")

        def user(_: int, is_over: IsOver) -> None:
            for number in numbers:
                if is_over():
                    return
                ids = pb.TokenIds(ids=sources[number])
                asked = pb.GenerateRequest(prompt_ids=ids, max_new_tokens=max_new_tokens[number])
                if num_beams == 1:
                    asked.temperature = 0.0
                else:
                    asked.num_beams = num_beams
                try:
                    chunks = list(client.stream(asked, ANSWER_TIMEOUT_S))
                except CallError as error:
                    raise BackendError(f"line {number + 1} got {error}") from error
                first = [chunk for chunk in chunks if chunk.sequence == 0]
                answers[number] = [token for chunk in first for token in chunk.token_ids]
                texts[number] = "".join(chunk.text for chunk in first)

        start_s = time.perf_counter()
        run_users(user, num_users)
        result = {"seconds": time.perf_counter() - start_s, "answers": answers, "texts": texts}
        return result | {"num_tokens": sum(map(len, answers))}

    def memory(self) -> int | None:
        """Of the servers. None: this process didn't start them."""
        pids = [each.pid for each in self._servers if each.pid]
        return sum(map(peak_bytes_of, pids)) if pids else None

    def _connect(self, protocol: ProtocolName) -> list[ProtocolClient]:
        if protocol not in self._clients:
            self._clients[protocol] = [
                self._stack.enter_context(
                    closing(connect(protocol, server.address_for(protocol), Access()))
                )
                for server in self._servers
            ]
        return self._clients[protocol]


def _streaming(
    client: ProtocolClient, num_new: int, temperature: float
) -> Callable[[Sequence[int]], Streamed]:
    def stream(ids: Sequence[int]) -> Streamed:
        start_s, first_s, num_tokens = time.perf_counter(), 0.0, 0
        try:
            for chunk in client.stream(request(ids, num_new, temperature), ANSWER_TIMEOUT_S):
                if not num_tokens:
                    first_s = time.perf_counter() - start_s
                num_tokens += len(chunk.token_ids)
        except CallError as error:
            raise BackendError(f"Quill ended a stream: {error}") from error
        return Streamed(num_tokens, first_s)

    return stream


def request(ids: Sequence[int], num_new: int, temperature: float) -> pb.GenerateRequest:
    """Overrides all defaults of the bundle."""
    return pb.GenerateRequest(
        prompt_ids=pb.TokenIds(ids=ids),
        max_new_tokens=num_new,
        ignore_eos=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
    )


def main(make: Callable[[ServerConfig, ExitStack], Any]) -> None:
    """Serves a backend whose server ends with this process."""
    with ExitStack() as stack:
        config = json.loads(sys.argv[1])
        serve(make(ServerConfig(**config | {"options": tuple(config["options"])}), stack))


if __name__ == "__main__":
    main(QuillServer)

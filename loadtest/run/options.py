"""The arguments of `quill loadtest`, and the options that they make.

Knows: argparse, which options go together. Imports nothing heavy: `--help` must answer at once.
"""

import argparse
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from quill.loadtest.errors import OptionError
from quill.loadtest.protocols.names import PROTOCOLS, ProtocolName
from quill.server.cli.arguments import add_access, address, addresses
from quill.server.client.target import is_multiple

if TYPE_CHECKING:
    from quill.loadtest.workload.schedule import Plan

DEFAULT_USERS = 8
DEFAULT_RATE = 1.0
DEFAULT_DURATION_S = 30.0


def add_loadtest(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_server(parser)
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--users",
        type=int,
        metavar="N",
        help=f"closed loop: each sends a request after its last answer (default {DEFAULT_USERS})",
    )
    load.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="open loop: requests a second, Poisson; latency counts from when one was due",
    )
    add("--shape", choices=("constant", "ramp", "search"), default="constant",
        help="ramp: from nothing to --users or --rate; search: the highest rate that meets --slo, "
        "each step as long as --duration, first --rate (default 1)")  # fmt: skip
    add("--duration", metavar="TIME", help="500ms, 30s, 2m (default 30s, or --requests' end)")
    add("--requests", type=int, default=0, metavar="N", help="end after so many")
    add("--scenario", default="short-chat", metavar="NAME",
        help="short-chat, long-prompt, long-answer, shared-prompt, system-prompts, structured, "
        "mixed; cancels, slow-readers, deadlines, bad-requests, reconnects, unfriendly; beams; "
        "embed (default short-chat)")  # fmt: skip
    add("--seed", type=int, metavar="N",
        help="from 1; the same seed sends the same requests (default: a new one)")  # fmt: skip
    add("--max-new-tokens", type=int, default=0, metavar="N", help="limit all answers")
    add("--slo", metavar="LIMITS", help="ttft=500ms,gap=100ms (also tpot, total)")
    add("--verify", action="store_true",
        help="send each request again, alone, and fail if an answer differs")  # fmt: skip
    add("--recorded", type=Path, metavar="FILE",
        help="no load: report on, or verify, an earlier run's requests.csv")  # fmt: skip
    add("--workers", type=int, default=0, metavar="N",
        help="spread the load over so many Locust processes (default: one)")  # fmt: skip
    add("--out", type=Path, default=Path("runs/loadtest"), metavar="DIR",
        help="where the report goes; replaces an older one (default runs/loadtest)")  # fmt: skip


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--address", type=addresses, metavar="HOST:PORT",
        help="default: a server is started, and stopped afterwards; several are "
        "quill://HOST:PORT,HOST:PORT or quill+dns://NAME:PORT")  # fmt: skip
    add("--bundle", metavar="SOURCE", help="of the started server, as `quill serve` takes it")
    add(
        "--precision",
        metavar="P",
        help="of the started server: fp32, quill8, … (default: the fastest)",
    )
    add("--serve", default="", metavar="OPTIONS",
        help="more options of the started server, in quotes: '--max-num-seqs 32'")  # fmt: skip
    add("--metrics", metavar="URL", help="of the server at --address (default: the next port)")
    add("--protocol", choices=PROTOCOLS, default="grpc",
        help="of the load (default grpc)")  # fmt: skip
    add("--http", type=address, metavar="HOST:PORT",
        help="of --address, for --protocol http (default: the port after the next)")  # fmt: skip
    add_access(parser)


@dataclass(frozen=True)
class LoadtestOptions:
    """The options of `quill loadtest`, checked."""

    address: str | None
    bundle: str | None
    serve_options: tuple[str, ...]
    metrics: str | None  # their URL
    protocol: ProtocolName
    http: str | None  # its address
    access_options: tuple[str, ...]  # for Locust's processes: names of files, never a key
    users: int  # 0: open loop
    shape: str
    plan: "Plan"
    slo: str | None
    verify: bool
    recorded: Path | None
    workers: int
    out: Path

    def __post_init__(self) -> None:
        plan = self.plan
        counts = {"users": self.users, "rate": plan.rate, "requests": plan.max_requests}
        counts |= {"max-new-tokens": plan.max_new_tokens, "workers": self.workers}
        for name, value in counts.items():
            if value < 0:
                raise OptionError(f"--{name} is below 0; it counts something")
        if self.address and (self.bundle or self.serve_options):
            raise OptionError(
                "--address names a server; --bundle, --precision and --serve start one"
            )
        if self.address and is_multiple(self.address) and self.protocol != "grpc":
            raise OptionError("several servers are balanced over gRPC only. Leave out --protocol")
        if plan.scenario == "embed" and self.protocol != "grpc":
            raise OptionError("--scenario embed works over gRPC only. Leave out --protocol")
        if self.shape == "search" and (not self.slo or not plan.rate):
            raise OptionError(
                "--shape search needs --slo, such as ttft=500ms,gap=100ms, and searches a --rate, "
                "not a number of --users"
            )
        if self.shape != "constant" and not plan.duration_s:
            raise OptionError(f"--shape {self.shape} needs a --duration, such as 30s")


def read_options(args: argparse.Namespace) -> LoadtestOptions:
    from quill.loadtest.workload.schedule import Plan  # loads protobuf: not for `--help`

    is_open = args.rate is not None or (args.shape == "search" and args.users is None)
    precision = ("--precision", args.precision) if args.precision else ()
    if args.rate == 0 or args.users == 0:
        raise OptionError("--users and --rate must be above 0")
    if args.seed is not None and args.seed < 1:
        raise OptionError(f"--seed is {args.seed}; seeds begin at 1")
    duration_s = _duration_s(args)
    plan = Plan(
        scenario=args.scenario,
        seed=args.seed or 0,
        max_requests=args.requests,
        duration_s=duration_s,
        rate=(args.rate or DEFAULT_RATE) if is_open else 0.0,
        ramp_s=duration_s if args.shape == "ramp" else 0.0,
        max_new_tokens=args.max_new_tokens,
    )
    names = [each.name for each in fields(LoadtestOptions)]
    given = {name: value for name, value in vars(args).items() if name in names}
    given["users"] = 0 if is_open else args.users or DEFAULT_USERS
    serve_options = (*precision, *shlex.split(args.serve))
    access_options = _access_options(args)
    return LoadtestOptions(
        **given, plan=plan, serve_options=serve_options, access_options=access_options
    )


def _access_options(args: argparse.Namespace) -> tuple[str, ...]:
    flags = [f"--{name}" for name in ("tls", "insecure") if getattr(args, name)]
    for name in ("ca", "cert", "key", "api_key_file"):
        path = getattr(args, name)
        flags += [] if path is None else [f"--{name.replace('_', '-')}", str(path)]
    return tuple(flags)


def _duration_s(args: argparse.Namespace) -> float:
    if args.duration is None:
        return 0.0 if args.requests and args.shape == "constant" else DEFAULT_DURATION_S
    from quill.loadtest.results.slo import parse_duration_ms

    return parse_duration_ms(args.duration) / 1000

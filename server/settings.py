"""The options of a server: one table, from which everything about an option is made.

Knows: names, types, defaults, ranges, help texts; which combinations of options are rejected.
Does not know: what the options do. Imports nothing but the standard library.

A new option is ONE line in `Settings`. From that line come:
- `settings.NAME`, typed: the frozen `Settings` is passed to whoever needs it, never copied;
- the flag of `quill serve` and of whichever command names the option: `add_options(parser, names)`;
- the value from the command line, `read_settings(args)`, or from JSON or YAML, `from_plain(dict)`;
- the page server/docs/serve-options.md: `python -m quill.server.settings > server/docs/…`.

Another command with the same options (`quill cluster`) calls
`add_options(parser, CLUSTER_OPTIONS, defaults={"log_format": "json"}, helps={"threads": "…"})`,
then `read_settings(args)`; options that the command doesn't have keep their defaults. serve.yaml
holds `as_plain(settings, CLUSTER_OPTIONS)`, with `OPTIONS[name].help` as the comment beside each.
"""

# ruff: noqa: RUF009  `_option` makes a field, as `dataclasses.field` does
import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from quill.server.addresses import HTTP_OFFSET, METRICS_OFFSET, is_loopback, ports_to_try
from quill.server.errors import StartError

# A section of the page and of `--help`, and the component that uses its options.
SECTIONS = {
    "Addresses": "server/serve",
    "Model": "server/loading",
    "Engine": "server/engine",
    "Security": "server/auth",
    "Operation": "server/serve, server/telemetry",
}
STOP_S = 30.0  # how long an engine's step under way may take to end
PortChoice = int | Literal["auto", "off"]
_Value = TypeVar("_Value")


class Option(NamedTuple):
    """One option. `parse` is None for a switch; `choices` is empty where any value may stand."""

    name: str
    flag: str
    default: Any
    help: str
    section: str
    parse: Callable[[str], Any] | None
    metavar: str | None
    choices: tuple[str, ...]
    in_cluster: bool  # whether the replicas of `quill cluster` have it, too


def whole_number(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number from {least} to {most}")
    return int(text)


def positive(text: str) -> int:
    return whole_number(text, 1, 2**31 - 1)


def port_number(text: str) -> int:
    return whole_number(text, 0, 65535)


def optional_port(text: str) -> PortChoice:
    words: dict[str, PortChoice] = {"auto": "auto", "off": "off"}
    return words[text] if text in words else port_number(text)


def seconds(text: str, least: float = math.ulp(0.0)) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < 1e9:
        above = "from 0 up" if least == 0 else "above 0"
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of seconds {above}")
    return value


def _seconds_or_0(text: str) -> float:
    return seconds(text, 0.0)


def _host(text: str) -> str:
    return text.removeprefix("[").removesuffix("]")  # some write IPv6 so


def _model_name(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= 200:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a name of 1 to 200 printable characters")
    return text


def _option(
    default: _Value,
    section: str,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    *,
    help: str,
    choices: tuple[str, ...] = (),
    in_cluster: bool = False,
) -> _Value:
    metadata = {"option": (help, section, parse, metavar, choices, in_cluster)}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    cert: Path
    key: Path
    client_ca: Path | None = None  # given: clients must show a certificate that it signed

    @property
    def paths(self) -> list[Path]:
        return [self.cert, self.key, *([] if self.client_ca is None else [self.client_ca])]


# fmt: off
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The table. None: the server chooses, and logs its choice. A field's flag is its name with
    dashes, without the unit: `drain_timeout_s` is --drain-timeout."""

    host: str = _option("127.0.0.1", "Addresses", _host,
        help="the address to listen at; 127.0.0.1: this machine only")
    port: int = _option(50051, "Addresses", port_number,
        help="for gRPC; 0: any free one")
    metrics_port: PortChoice = _option("auto", "Addresses", optional_port, "PORT", in_cluster=True,
        help="for Prometheus; 'auto': --port + 1, or a free one; 'off': none")
    http_port: PortChoice = _option("auto", "Addresses", optional_port, "PORT",
        help="for OpenAI's clients and browsers; 'auto': --port + 2, or a free one; 'off': none")

    frontends: int = _option(1, "Addresses", positive, "N",
        help="processes that accept calls and share the ports (SO_REUSEPORT); more than one where "
             "one core can't accept all calls")

    device: str = _option("auto", "Model", str, choices=("auto", "cpu", "cuda"),
        help="where the model runs")
    precision: str | None = _option(None, "Model", str, "NAME", in_cluster=True,
        help="which graphs: fp32, quill4, quill8 or fp16 (without it: the bundle's fastest)")
    context: int | None = _option(None, "Model", positive, "TOKENS", in_cluster=True,
        help="most tokens of a prompt and its answer together (without it: the bundle's)")
    served_model_name: tuple[str, ...] = _option((), "Model", _model_name, "NAME", in_cluster=True,
        help="names that clients may give as `model`; the first is reported (without it: the "
             "bundle's)")
    kv_cache_mb: int | None = _option(None, "Model", positive, "MB", in_cluster=True,
        help="memory of the KV cache, for running sequences and cached prefixes (without it: 2,048 "
             "where there is as much)")

    max_num_seqs: int | None = _option(None, "Engine", positive, "N", in_cluster=True,
        help="sequences that run at the same time, if the KV cache holds them (without it: 256)")
    max_queue: int = _option(256, "Engine", positive, "N", in_cluster=True,
        help="requests that may wait; one more is rejected")
    prefix_cache: bool = _option(True, "Engine", in_cluster=True,
        help="prefix caching: sequences with a shared prefix share its KV blocks")
    prefix_cache_dir: Path | None = _option(None, "Engine", Path, "DIR", in_cluster=True,
        help="the prefix cache's blocks are kept there, too, for the next start; servers may share "
             "it; prompts can be inferred from it")
    prefix_cache_dir_mb: int = _option(8192, "Engine", positive, "MB", in_cluster=True,
        help="what --prefix-cache-dir holds at most; the least recently used blocks are removed")
    speculative: bool = _option(True, "Engine", in_cluster=True,
        help="speculative decoding by prompt lookup (n-gram), where it is faster; it changes no "
             "token")
    threads: int | None = _option(None, "Engine", positive, "N", in_cluster=True,
        help="threads of the engine (without it: one a core)")
    spinning: bool = _option(True, "Engine", in_cluster=True,
        help="threads stay awake between steps, which is faster; --no-spinning is for cores that "
             "other programs keep busy, too")

    tls_cert: Path | None = _option(None, "Security", Path, "PEM",
        help="the server's certificate; read again when it changes")
    tls_key: Path | None = _option(None, "Security", Path, "PEM",
        help="the certificate's key; read again when it changes")
    client_ca: Path | None = _option(None, "Security", Path, "PEM",
        help="only clients with a certificate that this authority signed may call")
    api_keys: Path | None = _option(None, "Security", Path, "FILE", in_cluster=True,
        help="only callers with one of these keys may call; `quill keys add` makes them")
    allow_unauthenticated: tuple[str, ...] = _option((), "Security", str, in_cluster=True,
        choices=("reflection", "metrics"),
        help="callers without a key may have it, too; may be given twice (health always is)")
    share_prefix_cache: bool = _option(False, "Security", in_cluster=True,
        help="callers of all keys share cached prefixes: faster where prompts have one in common, "
             "but a caller can find out by timing what others sent")
    insecure: bool = _option(False, "Security",
        help="other machines may call in the clear, or without proof of who they are")

    drain_timeout_s: float = _option(30.0, "Operation", _seconds_or_0, "SECONDS",
        help="how long running requests may go on after SIGTERM")
    watchdog_s: float = _option(60.0, "Operation", seconds, "SECONDS",
        help="health is NOT_SERVING while a step takes longer")
    tracing: bool = _option(False, "Operation", in_cluster=True,
        help="send OpenTelemetry spans to $OTEL_EXPORTER_OTLP_ENDPOINT")
    max_key_labels: int = _option(32, "Operation", positive, "N", in_cluster=True,
        help="API keys and client certificates with metrics of their own; others share a label")
    log_format: str = _option("text", "Operation", str, choices=("text", "json"), in_cluster=True,
        help="json: one object a line, for machines")

    # Without flags.
    max_message_bytes: int = 4 * 2**20
    write_timeout_s: float = 60.0  # a client that reads nothing for longer is disconnected
    # fmt: on

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StartError("--tls-cert and --tls-key belong together: give both")
        if self.client_ca is not None and self.tls_cert is None:
            raise StartError("--client-ca needs --tls-cert and --tls-key")
        if self.prefix_cache_dir is not None and not self.prefix_cache:
            raise StartError("--prefix-cache-dir needs prefix caching: leave out --no-prefix-cache")

    @property
    def tls(self) -> TlsFiles | None:
        """None: in the clear."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(cert=self.tls_cert, key=self.tls_key, client_ca=self.client_ca)

    @property
    def metrics_ports(self) -> tuple[int, ...]:
        """The ports to try, in order; empty: no metrics."""
        return ports_to_try(self.metrics_port, self.port, METRICS_OFFSET)

    @property
    def http_ports(self) -> tuple[int, ...]:
        return ports_to_try(self.http_port, self.port, HTTP_OFFSET)


def _read_table() -> dict[str, Option]:
    rows = [each for each in dataclasses.fields(Settings) if "option" in each.metadata]
    flags = [f"--{row.name.removesuffix('_s').replace('_', '-')}" for row in rows]
    return {
        row.name: Option(row.name, flag, row.default, *row.metadata["option"])
        for row, flag in zip(rows, flags, strict=True)
    }


OPTIONS = _read_table()
CLUSTER_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.in_cluster)


def add_options(
    parser: argparse.ArgumentParser,
    names: Iterable[str] = tuple(OPTIONS),
    *,
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
) -> None:
    """Adds flags, in one group for each section. `defaults`, `helps`: the command's own."""
    defaults, helps, groups = defaults or {}, helps or {}, {}
    for name in names:
        option = OPTIONS[name]._replace(help=helps.get(name, OPTIONS[name].help))
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section.lower())
        _add_option(groups[option.section], option, defaults.get(name, option.default))


def _add_option(group: "argparse._ArgumentGroup", option: Option, default: Any) -> None:
    shown = _written(default)
    text = f"{option.help} (default: {shown})" if shown else option.help
    if isinstance(default, bool):
        switch: Any = argparse.BooleanOptionalAction if default else "store_true"
        group.add_argument(
            option.flag, dest=option.name, action=switch, default=default, help=text
        )
        return
    several = isinstance(default, tuple)
    action: Any = {"action": "append"} if several else {}
    if several and not option.choices:
        action = {"action": "extend", "nargs": "+"}
    group.add_argument(
        option.flag,
        dest=option.name,
        default=list(default) if several else default,
        type=option.parse or str,
        metavar=option.metavar,
        choices=option.choices or None,
        help=text,
        **action,
    )


def read_settings(args: argparse.Namespace) -> Settings:
    """An option that the command doesn't have keeps its default."""
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    return Settings(**{name: _frozen(value) for name, value in given.items()})


def as_plain(settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """As JSON and YAML have values: paths are texts, tuples are lists."""
    return {name: _plain(getattr(settings, name)) for name in names}


def from_plain(values: Mapping[str, Any], names: Iterable[str] = tuple(OPTIONS)) -> Settings:
    """Reads what `as_plain` wrote, by the rules of the command line."""
    known = tuple(names)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise StartError(
            f"unknown options: {', '.join(unknown)}; known are: {', '.join(sorted(known))}"
        )
    return Settings(**{name: _checked(OPTIONS[name], value) for name, value in values.items()})


def _checked(option: Option, value: Any) -> Any:
    if value is None or isinstance(option.default, bool):
        if not isinstance(value, type(option.default)):
            raise StartError(f"{option.name} is {value!r}; it must be {_kind(option)}")
        return value
    if isinstance(option.default, tuple):
        if not isinstance(value, list):
            raise StartError(f"{option.name} is {value!r}; it must be a list")
        return tuple(_parsed(option, each) for each in value)
    return _parsed(option, value)


def _parsed(option: Option, value: Any) -> Any:
    assert option.parse is not None
    try:
        parsed = option.parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise StartError(f"{option.name}: {error}") from None
    if option.choices and parsed not in option.choices:
        raise StartError(f"{option.name} is {value!r}; it must be {_kind(option)}")
    return parsed


def _kind(option: Option) -> str:
    if option.choices:
        return " or ".join(option.choices)
    return "true or false" if isinstance(option.default, bool) else "a value"


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _written(default: Any) -> str:
    """Empty where no default is to be shown: help says what the server does without the option."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default == ():
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def check_exposure(settings: Settings) -> None:
    """Rejects to serve other machines in the clear, or whoever they are, without --insecure."""
    if is_loopback(settings.host) or settings.insecure:
        return
    if settings.tls is None:
        raise StartError(
            f"--host {settings.host} can be reached from other machines, and without --tls-cert "
            "and --tls-key everybody on the way can read the traffic. Give both, or --insecure if "
            "something in front of this server encrypts"
        )
    if settings.api_keys is None and settings.client_ca is None:
        raise StartError(
            f"--host {settings.host} can be reached from other machines, and without --api-keys or "
            "--client-ca anybody may call. Give one, or --insecure if something in front of this "
            "server authenticates callers"
        )


def options_page() -> str:
    """server/docs/serve-options.md."""
    lines = [
        "# Options of `quill serve`",
        "",
        "`python -m quill.server.settings` writes this page from the table in "
        "[server/settings.py](../settings.py).",
        "`quill cluster` has the options marked with ✓ for its replicas, too.",
    ]
    for section, component in SECTIONS.items():
        lines += ["", f"## {section}", "", f"Used by {component}.", ""]
        lines += ["| option | default | what it is | cluster |", "|---|---|---|---|"]
        lines += [_row(each) for each in OPTIONS.values() if each.section == section]
    return "\n".join(lines) + "\n"


def _row(option: Option) -> str:
    value = "\\|".join(option.choices) or option.metavar or ("VALUE" if option.parse else "")
    flag = f"{option.flag} {value}".strip()
    if option.default is True:
        flag = f"{flag}, {option.flag.replace('--', '--no-', 1)}"
    shown = _written(option.default) or "–"
    return f"| `{flag}` | {shown} | {option.help} | {'✓' if option.in_cluster else ''} |"


if __name__ == "__main__":
    print(options_page(), end="")

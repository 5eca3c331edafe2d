"""What a person may choose when a server starts, and which choices are refused.

Knows: the command line's names. Does not know: what the choices do.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from quill.server.addresses import is_loopback
from quill.server.errors import StartError

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    cert: Path
    key: Path
    client_ca: Path | None = None  # given: clients must show a certificate that it signed

    @property
    def paths(self) -> list[Path]:
        return [self.cert, self.key, *([] if self.client_ca is None else [self.client_ca])]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a person may choose. None: the server chooses, and says what."""

    host: str = "127.0.0.1"
    port: int = 50051  # 0: any free one
    metrics_port: int | None = None  # None: no metrics
    any_metrics_port: bool = False  # if that one is taken
    http_port: int | None = None  # None: no HTTP
    any_http_port: bool = False
    device: str = "auto"
    precision: str | None = None
    max_num_seqs: int | None = None
    context: int | None = None
    cache_bytes: int | None = None
    prefix_cache: bool = True
    speculative: bool = True
    share_cache: bool = False  # between callers of different keys
    threads: int | None = None
    spinning: bool = True
    max_waiting: int = 256
    max_message_bytes: int = 4 * 2**20
    grace_s: float = 30.0
    max_step_s: float = 60.0  # a step that takes longer hangs, and health says so
    write_timeout_s: float = 60.0  # a reader that takes longer is ended
    tracing: bool = False
    log_format: str = "text"  # or "json"
    tls: TlsFiles | None = None  # None: in the clear
    api_keys: Path | None = None  # None: anybody may call
    open_reflection: bool = False  # to callers without a key
    open_metrics: bool = False
    insecure: bool = False  # other machines may call although nothing protects the server


def read_settings(args: argparse.Namespace) -> Settings:
    return Settings(
        host=args.host.removeprefix("[").removesuffix("]"),  # some write IPv6 so
        port=args.port,
        metrics_port=_port_beside(args.port, 1, args.metrics_port),
        any_metrics_port=args.metrics_port == "auto",
        http_port=_port_beside(args.port, 2, args.http_port),
        any_http_port=args.http_port == "auto",
        device=args.device,
        precision=args.precision,
        max_num_seqs=args.max_num_seqs,
        context=args.context,
        cache_bytes=None if args.kv_cache_mb is None else args.kv_cache_mb * 2**20,
        prefix_cache=args.prefix_cache,
        speculative=args.speculative,
        share_cache=args.share_prefix_cache,
        threads=args.threads,
        spinning=args.spinning,
        max_waiting=args.max_queue,
        grace_s=args.drain_timeout,
        max_step_s=args.watchdog,
        tracing=args.tracing,
        log_format=args.log_format,
        tls=_read_tls(args),
        api_keys=args.api_keys,
        open_reflection="reflection" in args.allow_unauthenticated,
        open_metrics="metrics" in args.allow_unauthenticated,
        insecure=args.insecure,
    )


def _port_beside(port: int, distance: int, given: str | int) -> int | None:
    if given == "off":
        return None
    if given == "auto":
        return port + distance if 0 < port <= MAX_PORT - distance else 0
    return int(given)


def _read_tls(args: argparse.Namespace) -> TlsFiles | None:
    if args.tls_cert is None and args.tls_key is None:
        if args.client_ca is not None:
            raise StartError("--client-ca needs --tls-cert and --tls-key")
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise StartError("--tls-cert and --tls-key belong together: give both")
    return TlsFiles(cert=args.tls_cert, key=args.tls_key, client_ca=args.client_ca)


def check_exposure(settings: Settings) -> None:
    """Refuses to serve other machines in the clear, or whoever they are, unless told to."""
    if is_loopback(settings.host) or settings.insecure:
        return
    if settings.tls is None:
        raise StartError(
            f"--host {settings.host} can be reached from other machines, and without --tls-cert "
            "and --tls-key everybody on the way reads along. Give them, or --insecure if something "
            "in front of this server sees to it"
        )
    if settings.api_keys is None and settings.tls.client_ca is None:
        raise StartError(
            f"--host {settings.host} can be reached from other machines, and without --api-keys or "
            "--client-ca anybody may call. Give one, or --insecure if something in front of this "
            "server sees to it"
        )

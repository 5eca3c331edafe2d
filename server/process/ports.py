"""The ports of a server with several frontends: all listen at the same ones (SO_REUSEPORT).

Knows: sockets. Does not know: who listens, gRPC, HTTP.
"""

import os
import socket
from dataclasses import replace

from quill.server.addresses import open_first, write_address
from quill.server.errors import StartError
from quill.server.settings import PortChoice, Settings


def check_free(settings: Settings) -> None:
    """StartError: another server listens at --port. Before minutes are spent on a model."""
    if settings.port:
        try:
            _bound(settings.host, settings.port, socket.SO_REUSEADDR).close()
        except OSError as error:
            raise _taken(settings.host, settings.port, "--port", error) from error


def _taken(host: str, port: int, option: str, error: OSError) -> StartError:
    return StartError(
        f"can't listen at {write_address(host, port)}: {error.strerror}. Is another server there? "
        f"Give another {option}"
    )


class Ports:
    """Chosen and kept, for as long as this lives, from whoever doesn't know them."""

    def __init__(self, settings: Settings) -> None:
        """StartError: another server is there."""
        self._host = settings.host
        self._kept: list[socket.socket] = []
        port = self._take((settings.port,), "--port")
        assert port is not None
        chosen = replace(settings, port=port)
        metrics = self._take(chosen.metrics_ports, "--metrics-port")
        http = self._take(chosen.http_ports, "--http-port")
        self.settings = replace(chosen, metrics_port=_written(metrics), http_port=_written(http))

    def _take(self, ports: tuple[int, ...], option: str) -> int | None:
        if not ports:
            return None
        return open_first(ports, lambda port: self._claim(port, option), option)

    def _claim(self, port: int, option: str) -> int:
        """By the rules of those who don't share a port, and before anybody else who shares one.

        Both sockets may be bound at once because neither listens, so the port is never free in
        between.
        """
        try:
            with _bound(self._host, port, socket.SO_REUSEADDR) as alone:
                port = int(alone.getsockname()[1])
                self._kept.append(_named(f"quill-{os.getuid()}-{self._host}-{port}"))
                self._kept.append(
                    _bound(self._host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
                )
            return port
        except OSError as error:
            raise _taken(self._host, port, option, error) from error


def _bound(host: str, port: int, *options: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _named(name: str) -> socket.socket:
    """A name outside of the file system that one process has, until it ends: while a server loads,
    nobody listens at its ports yet."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0{name}")
    except BaseException:
        held.close()
        raise
    return held


def _written(port: int | None) -> PortChoice:
    return "off" if port is None else port

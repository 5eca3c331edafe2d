"""Numbers on the command line, each with its range. Imports nothing heavy."""

import argparse
from typing import TypeAlias

# What a parser of commands hands to those who add one.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def port(text: str) -> int:
    return number(text, 0, 65535)


def address(text: str) -> str:
    """gRPC itself would guess: 443 for a port that is missing, another port for one above 65535."""
    host, _, number = text.rpartition(":")
    if "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r} isn't HOST:PORT: leave out http:// and paths")
    if not host or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} isn't HOST:PORT, such as 127.0.0.1:50051")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise argparse.ArgumentTypeError(f"{text!r} isn't HOST:PORT: write [::1]:50051 for IPv6")
    if not 1 <= int(number) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} has port {number}; ports are from 1 to 65535")
    return text


def optional_port(text: str) -> str | int:
    return text if text in ("auto", "off") else port(text)


def positive(text: str) -> int:
    return number(text, 1, 2**31 - 1)


def replicas(text: str) -> tuple[int, int]:
    """A number, or two with dots between them: at least and at most."""
    least, dots, most = text.partition("..")
    bounds = positive(least), positive(most if dots else least)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} begins above its end; write 2..8")
    return bounds


def natural(text: str) -> int:
    return number(text, 0, 2**31 - 1)


def number(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number from {least} to {most}")
    return int(text)


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of seconds above 0")
    return seconds

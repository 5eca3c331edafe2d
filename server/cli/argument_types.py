"""Numbers on the command line, each with its range. Imports nothing heavy."""

import argparse
import re
from typing import TypeAlias

from quill.server.addresses import check_address
from quill.server.client.target import TargetError, is_multiple, read_target

# What a parser of commands hands to those who add one.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def port(text: str) -> int:
    return number(text, 0, 65535)


def address(text: str) -> str:
    """Of one server."""
    if is_multiple(text):
        rule = "asks one server: give its own HOST:PORT"
        raise argparse.ArgumentTypeError(f"{text!r} are several, and this {rule}")
    try:
        return check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def addresses(text: str) -> str:
    """Of one server, or of several as a client takes them."""
    if not is_multiple(text):
        return address(text)
    try:
        read_target(text)
    except TargetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
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


def sha256(text: str) -> str:
    if re.fullmatch("[0-9a-fA-F]{64}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a SHA-256: 64 digits from 0 to f")
    return text.lower()


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

"""Arguments that several commands have: addresses, TLS and API keys, options of requests.

Knows: argparse, the table of request fields. Does not know: requests. Imports nothing heavy:
`--help` must answer at once.
"""

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from quill.server.addresses import check_address
from quill.server.client.target import TargetError, is_multiple, read_target
from quill.server.fields import Field
from quill.server.settings import positive as positive
from quill.server.settings import whole_number

# What a parser of commands passes to those who add one.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
ADDRESS = "127.0.0.1:50051"
SEVERAL = "quill://HOST:PORT,HOST:PORT or quill+dns://NAME:PORT"
_FORMS = {
    "integer": "a whole number",
    "integers": "a whole number",
    "number": "a number",
    "bias": "ID:BIAS, such as 42:-100",
}
_METAVARS = {"strings": "TEXT", "integers": "ID", "bias": "ID:BIAS"}


def add_command(
    subparsers: Subparsers, name: str, run: str, extra: str, *, help: str, description: str
) -> argparse.ArgumentParser:
    """`run`: module:function; `extra`: what brings the packages that the function imports."""
    parser = subparsers.add_parser(name, help=help, description=description)
    parser.set_defaults(run=run, extra=extra)
    return parser


def add_option(
    parser: argparse._ActionsContainer,
    flag: str,
    help: str,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    default: Any = None,
    **more: Any,
) -> None:
    """A flag with a value; without `parse`, a switch. The help text ends with the default."""
    if parse is None:
        parser.add_argument(flag, action="store_true", help=help)
        return
    shown = f"{default:g}" if isinstance(default, float) else default
    text = help if default is None else f"{help} (default {shown})"
    parser.add_argument(flag, type=parse, metavar=metavar, default=default, help=text, **more)


def add_fields(parser: argparse.ArgumentParser, fields: Iterable[Field]) -> None:
    """A flag for each option of a request, also by its name in OpenAI's JSON. One that isn't given
    is None."""
    group = parser.add_argument_group("request")
    for field in fields:
        several = "; may be given several times" if field.is_list else ""
        options: dict[str, Any] = {"dest": field.name, "help": field.help + several}
        if field.type == "boolean":
            is_unset = field.default is None
            options["action"] = argparse.BooleanOptionalAction if is_unset else "store_const"
            options |= {} if is_unset else {"const": True}
        elif field.choices is not None:
            options["choices"] = [each.replace("_", "-") for each in field.choices.values]
        else:
            options |= {"type": _parser(field), "metavar": _METAVARS.get(field.type, "N")}
            options |= {"action": "append"} if field.is_list else {}
        flags = dict.fromkeys((field.flag, f"--{field.json_name.replace('_', '-')}"))
        group.add_argument(*flags, **options)


def given_fields(args: argparse.Namespace, fields: Iterable[Field]) -> dict[str, Any]:
    """The options that were given, by name; the model's or the server's default applies to others.
    Names of choices are those of the table."""
    given: dict[str, Any] = {}
    for field in fields:
        value = getattr(args, field.name, None)
        if value is None:
            continue
        if field.choices is not None:
            value = value.replace("-", "_")
        given[field.name] = dict(value) if field.type == "bias" else value
    return given


def _parser(field: Field) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return field.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} isn't {_FORMS[field.type]}") from None

    return parse


def add_address(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """For a client. `many`: several servers may be given."""
    several = f"; several servers are {SEVERAL}" if many else ""
    group = parser.add_argument_group("connection")
    text = f"the server's gRPC port{several}"
    add_option(group, "--address", text, addresses if many else address, "HOST:PORT", ADDRESS)
    _add_access(parser, group)


def add_access(parser: argparse.ArgumentParser) -> None:
    """TLS and API key of a client."""
    _add_access(parser, parser.add_argument_group("connection"))


def _add_access(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    # gRPC's own log lines would hide the one line that says what to do.
    parser.set_defaults(environment={"GRPC_VERBOSITY": "NONE"})
    add_option(group, "--tls", "use TLS and trust this machine's authorities")
    add_option(group, "--ca", "use TLS and trust this certificate authority", Path, "PEM")
    add_option(group, "--cert", "the client's certificate", Path, "PEM")
    add_option(group, "--key", "the certificate's private key", Path, "PEM")
    key = "a file with the API key (default: $QUILL_API_KEY)"
    add_option(group, "--api-key-file", key, Path, "FILE")
    add_option(group, "--insecure", "allow the API key to be sent without TLS")


def address(text: str) -> str:
    """Of one server."""
    if is_multiple(text):
        rule = "this command calls one server: give its HOST:PORT"
        raise argparse.ArgumentTypeError(f"{text!r} are several servers; {rule}")
    try:
        return check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def addresses(text: str) -> str:
    """Of one server or of several."""
    if not is_multiple(text):
        return address(text)
    try:
        read_target(text)
    except TargetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def replicas(text: str) -> tuple[int, int]:
    """A number, or a minimum and a maximum with two dots between them."""
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
    return whole_number(text, 0, 2**31 - 1)

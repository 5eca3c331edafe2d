"""Commands as tables: each has a name, the function that runs it, its help and its options.

Knows: argparse. Does not know: any command. Imports nothing heavy: `--help` must answer at once.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Option(NamedTuple):
    """Without `metavar` and `more`: a switch. The help ends with the default, if there is one."""

    name: str  # of an argument, with a question mark at its end: it may be left out
    help: str | None = None
    metavar: str | None = None
    type: Callable[[str], Any] = int
    default: Any = None
    more: Mapping[str, Any] = {}  # argparse's own: choices, required, …


class Command(NamedTuple):
    name: str
    run: str  # module:function
    help: str
    options: tuple[Option | str, ...]  # a text begins a group
    description: str = ""  # by default the help
    extra: str = ""  # of pyproject.toml, which brings what the function imports


def add_commands(subparsers: Subparsers, commands: Iterable[Command]) -> None:
    for command in commands:
        described = command.description or f"{command.help[0].upper()}{command.help[1:]}."
        parser = subparsers.add_parser(command.name, help=command.help, description=described)
        group: argparse._ActionsContainer = parser
        for option in command.options:
            if isinstance(option, str):
                group = parser.add_argument_group(option)
            else:
                add_option(group, option)
        parser.set_defaults(run=command.run, extra=command.extra)


def add_option(parser: argparse._ActionsContainer, option: Option) -> None:
    if option.metavar is None and not option.more:
        parser.add_argument(option.name, action="store_true", help=option.help)
        return
    text = option.help
    if option.default is not None:
        text = "; ".join(filter(None, (text, f"default {option.default}")))
    settings: dict[str, Any] = {"help": text, **option.more}
    if option.metavar is not None:
        settings |= {"type": option.type, "metavar": option.metavar}
    if option.name.endswith("?"):
        settings["nargs"] = "?"
    if option.name.startswith("-"):
        settings.setdefault("default", option.default)
    parser.add_argument(option.name.removesuffix("?"), **settings)

"""Commands as tables: each has a name, the function that runs it, its help and its options.

Knows: argparse. Does not know: any command. Imports nothing heavy: `--help` must answer at once.
"""

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, with the option or command that was probably meant. Parsers of
    subcommands are of this class, too."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Also of a subcommand, where argparse would leave the rest to the command above it."""
        found, unknown = super().parse_known_args(args, namespace)
        for each in (word.partition("=")[0] for word in unknown if word.startswith("-")):
            self.error(f"unknown option {each}{_meant(each, self._option_string_actions)}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            kind = str(action.metavar).lower()
            self.error(f"unknown {kind} {value!r}{_meant(value, action.choices)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message}{end} See {self.prog} --help\n")


def _meant(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(known), n=1)
    return f". Did you mean {near[0]}?" if near else ""


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

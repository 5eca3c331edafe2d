"""The subcommands of this room and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each subcommand names the function that does the work as `module:function`.
"""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def register(subparsers: "Subparsers") -> None:
    """Adds this room's subcommands to the front door."""

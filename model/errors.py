"""Errors whose cause is the input or the machine, not a bug.

Every message has what was given, what is allowed, and what to do. The command line prints it as
one line and exits with `exit_code`.
"""

from collections.abc import Sequence


def first_few(names: Sequence[str]) -> str:
    """Some names for a message, however many there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


class ModelError(Exception):
    """The root of the package's errors."""

    exit_code = 1


class ConfigError(ModelError):
    """Settings that contradict each other or lie outside what the network can be."""

    exit_code = 2


class CorpusError(ModelError):
    """Data that can't be fetched, read or used."""


class CheckpointError(ModelError):
    """A checkpoint that is missing, damaged, or of another shape."""


class SourceError(CheckpointError):
    """A model that was named, and that isn't there or isn't one."""


class UnsupportedError(ModelError):
    """Somebody else's weights in a form that Quill doesn't know."""


class RequestError(ModelError):
    """A request that the network can't execute: a setting, a prompt, a layer."""

    exit_code = 2


class InterruptedWorkError(ModelError):
    """A signal stopped the work, and everything is saved."""

    exit_code = 130

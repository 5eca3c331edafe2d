"""What can go wrong in this room because of the world, not because of a bug.

Every message says what was given, what is allowed, and what to do. The front door prints it as
one line and exits with `exit_code`.
"""

from collections.abc import Sequence


def first_few(names: Sequence[str]) -> str:
    """Some names for a message, however many there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


class ModelError(Exception):
    """The root of this room's errors."""

    exit_code = 1


class ConfigError(ModelError):
    """Settings that contradict each other or lie outside what the network can be."""

    exit_code = 2


class CorpusError(ModelError):
    """Data that can't be fetched, read or used."""


class CheckpointError(ModelError):
    """A checkpoint that is missing, damaged, or of another shape."""


class UnsupportedError(ModelError):
    """Somebody else's weights in a form that Quill doesn't know."""


class RequestError(ModelError):
    """Something asked of a network that it can't do: a setting, a prompt, a layer."""

    exit_code = 2


class InterruptedWorkError(ModelError):
    """The person, or the system, asked the work to stop, and it did so in good order."""

    exit_code = 130

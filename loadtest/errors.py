"""What can go wrong in this room because of the world. Imports nothing.

Every message says what was given, what is allowed, and what to do.
"""


class LoadtestError(Exception):
    """The root of this room's errors. The front door prints it and exits with `exit_code`."""

    exit_code = 1


class OptionError(LoadtestError):
    """Options that don't go together, or that don't say what they must."""

    exit_code = 2


class StoppedError(LoadtestError):
    """Ctrl-C in the middle of a load. What there was is reported."""

    exit_code = 130


class NoServerError(LoadtestError):
    """There is no server to talk to, or it didn't start."""


class RecordError(LoadtestError):
    """A file of records that can't be read."""


class DifferentAnswerError(LoadtestError):
    """A request, asked again alone, was answered otherwise."""


class ContenderError(LoadtestError):
    """A contender of a benchmark that doesn't start, or doesn't do its task."""

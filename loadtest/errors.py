"""The errors of the load test. Imports nothing.

Every message says what was given, what is allowed, and what to do.
"""


class LoadtestError(Exception):
    """The root of the errors. The command line prints it and exits with `exit_code`."""

    exit_code = 1


class OptionError(LoadtestError):
    """Options that exclude each other, or that are incomplete."""

    exit_code = 2


class StoppedError(LoadtestError):
    """Ctrl-C in the middle of a load. The requests that had ended are reported."""

    exit_code = 130


class NoServerError(LoadtestError):
    """There is no server at the address, or it didn't start."""


class RecordError(LoadtestError):
    """A file of records that can't be read."""


class DifferentAnswerError(LoadtestError):
    """A request that was sent again, alone, has another answer."""


class BackendError(LoadtestError):
    """A backend of a benchmark that doesn't start, or fails a workload."""

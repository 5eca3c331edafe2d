"""Errors whose cause is the input or the machine, not a bug.

Every message has what was given, what is allowed, and what to do. The command line prints it as
one line and exits with `exit_code`. Imports nothing: the server reads bundles with it.
"""


class ExportError(Exception):
    """The root of the package's errors."""

    exit_code = 1


class UnsupportedModelError(ExportError):
    """A network of a shape that the operators can't compute."""

    exit_code = 2


class BundleError(ExportError):
    """A bundle that is missing, damaged, of another format, or without what was requested."""


class VerificationError(ExportError):
    """A graph that doesn't compute what PyTorch computes."""

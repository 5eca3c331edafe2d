"""What can go wrong in this room because of the world, not because of a bug.

Every message says what was given, what is allowed, and what to do. The front door prints it as
one line and exits with `exit_code`. Imports nothing: the server reads bundles with it.
"""


class ExportError(Exception):
    """The root of this room's errors."""

    exit_code = 1


class UnsupportedModelError(ExportError):
    """A network of a shape that the operators can't compute."""

    exit_code = 2


class BundleError(ExportError):
    """A bundle that is missing, damaged, of another format, or without what was asked for."""


class VerificationError(ExportError):
    """A graph that doesn't compute what PyTorch computes."""

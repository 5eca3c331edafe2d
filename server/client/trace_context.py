"""The caller's own trace, which the server's spans join.

Knows: OpenTelemetry, if the program has loaded it. Does not know: channels, calls.
"""

import sys


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Of the span that is current, by W3C's names. A program without OpenTelemetry has none, and
    nothing is imported for it."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return tuple(headers.items())

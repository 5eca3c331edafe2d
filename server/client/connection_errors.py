"""Why no call reaches a server: gRPC's words about a connection become advice.

Knows: how gRPC tells of connections that fail, the client's options. Does not know: calls, waiting.
What gRPC can't tell apart is told by what the client was given: a server that wants TLS hangs up on
a client without it, and one that wants a certificate on a client without one, both without a word.
"""

from dataclasses import dataclass

from quill.server.client.access import Access

_NO_PEM = "--ca, --cert or --key holds nothing that TLS can use: each must be a PEM file"
_NO_TLS = "the server there doesn't speak TLS. Leave out --tls, --ca, --cert and --key"
_OTHER_NAME = (
    "the server's certificate is for another name than the one in --address. Use a name that the "
    "certificate has, or make one that has this name"
)
_NOT_GRPC = "what answers there doesn't speak gRPC. Is it the port for metrics?"
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
# What gRPC says, and what it means; these stay as they are until somebody changes an option.
_LASTING = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "Hostname Verification Check failed": _OTHER_NAME,
    "Failed to create security handshaker": _NO_PEM,
    "Failed parsing HTTP/2": _NOT_GRPC,
}
_HUNG_UP = ("Socket closed", "Connection reset")


@dataclass(frozen=True)
class Diagnosis:
    """`is_lasting`: trying again is of no use."""

    reason: str
    is_lasting: bool = False


def diagnose(details: str, access: Access) -> Diagnosis | None:
    """None: this isn't about reaching the server."""
    if details.startswith("errors resolving"):
        return Diagnosis(f"the host in --address isn't known: {details}")
    if not details.startswith("failed to connect"):
        return None
    last = details.partition("last error: ")[2].partition(": ")[2] or details
    if _UNTRUSTED in last:
        return Diagnosis(_distrust(last, access), is_lasting=True)
    for words, reason in _LASTING.items():
        if words in last:
            return Diagnosis(reason, is_lasting=True)
    if any(words in last for words in _HUNG_UP):
        return Diagnosis(_hanging_up(access))
    return Diagnosis(f"no server answers: {last}. Is one running? `quill serve` starts it")


def _distrust(last: str, access: Access) -> str:
    why = last.partition(f"{_UNTRUSTED}: ")[2].removesuffix(": OK")
    trusted = "the authority in --ca" if access.ca is not None else "this machine's authorities"
    return (
        f"the server's certificate isn't good for {trusted}: {why}. If another authority signed "
        "it, give that one with --ca"
    )


def _hanging_up(access: Access) -> str:
    if not access.uses_tls:
        return "the server hung up at once, as one does that wants TLS. If so, give --ca or --tls"
    if access.cert is None:
        return (
            "the server hung up, as one does that wants a client's certificate (--client-ca). If "
            "so, give --cert and --key"
        )
    return (
        "the server hung up, as one does that doesn't trust the client's certificate. Is the one "
        "in --cert signed by an authority of the server's --client-ca?"
    )

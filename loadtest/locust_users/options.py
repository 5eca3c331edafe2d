"""What Locust's command line and page may be told beside Locust's own options.

Knows: Locust's parser. Does not know: what comes of it.
"""

from dataclasses import fields

from locust.argument_parser import LocustArgumentParser

from quill.loadtest.protocols.names import DOORS
from quill.loadtest.workload.scenarios import SCENARIOS
from quill.loadtest.workload.schedule import Plan


def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    for each in fields(Plan):
        choices = {"choices": list(SCENARIOS)} if each.name == "scenario" else {}
        kind, text = type(each.default), each.metadata["help"]
        add(f"--{each.metadata['option']}", type=kind, default=each.default, help=text, **choices)
    add("--protocol", choices=DOORS, default="grpc", help="the door: HTTP has a port of its own")
    add("--facts", default="", help="of the model, as JSON", include_in_web_ui=False)
    add(
        "--records", default="", help="write a CSV file with every request", include_in_web_ui=False
    )
    add("--progress", action="store_true", help="print progress as JSON", include_in_web_ui=False)
    _add_proof(parser)


def _add_proof(parser: LocustArgumentParser) -> None:
    """As for `quill generate`. Texts, not paths: they travel to the workers."""
    for name, text in (
        ("--ca", "use TLS, and trust this authority (PEM file)"),
        ("--cert", "the client's own certificate (PEM file)"),
        ("--key", "its key (PEM file)"),
        ("--api-key-file", "holds the API key; or $QUILL_API_KEY"),
    ):
        parser.add_argument(name, default="", help=text, include_in_web_ui=False)
    for name, text in (
        ("--tls", "use TLS; the machine's own authorities are trusted"),
        ("--insecure", "send the API key in the clear, if there is no TLS"),
    ):
        parser.add_argument(name, action="store_true", help=text, include_in_web_ui=False)

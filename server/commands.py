"""The subcommands of this room and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each subcommand names the function that does the work as `module:function`.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quill.server.access_options import add_access, add_protection
from quill.server.argument_types import metrics_port, natural, port, positive, seconds
from quill.server.operator_commands import add_keys, add_operating

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


# Where nothing is said of a default, it is the model's own, as its author wished.
_SAMPLING = (
    ("max-new-tokens", int, "at least 1 (default 256, or as many as fit)"),
    ("temperature", float, "0 is greedy: always the likeliest token; above 1 is wilder"),
    ("top-k", int, "draw from the k likeliest tokens; 0 is off"),
    ("top-p", float, "draw from the likeliest tokens that reach this probability; 1 is off"),
    ("min-p", float, "drop tokens below this share of the likeliest one's chance; 0 is off"),
    ("repetition-penalty", float, "above 1: tokens seen before are less likely; 1 is off"),
    ("frequency-penalty", float, "off a token's logit for each time it came; -2 to 2 (default 0)"),
    ("presence-penalty", float, "off a token's logit once it has come; -2 to 2 (default 0)"),
    ("seed", int, "the same seed gives the same answer (default: the server picks one)"),
    ("num-sequences", int, "how many answers (default 1)"),
    ("logprobs", int, "with --json: the n likeliest tokens at each position, 0 to 20"),
    ("prompt-logprobs", int, "with --json: the same for the prompt, 0 to 20"),
    ("priority", int, "higher goes first in the queue; -10 to 10 (default 0)"),
)


# Of these three conversations with SmolLM2-135M read best; hotter it babbles, cooler it repeats.
_CHAT_SAMPLING = {"temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.1}


def register(subparsers: "Subparsers") -> None:
    """Adds this room's subcommands to the front door."""
    _add_serve(subparsers)
    _add_generate(subparsers)
    _add_chat(subparsers)
    add_keys(subparsers)
    add_operating(subparsers)


def _add_serve(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a bundle over gRPC",
        description="Serves a bundle over gRPC. What isn't given is chosen from the machine's "
        "memory and the bundle, and printed.",
    )
    parser.add_argument(
        "bundle",
        nargs="?",
        type=Path,
        metavar="BUNDLE",
        help="a directory made by export (default: SmolLM2-135M-Instruct, made on the first start)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    parser.add_argument("--port", type=port, default=50051, help="0 takes a free one and prints it")
    parser.add_argument(
        "--metrics-port",
        default="auto",
        metavar="PORT",
        type=metrics_port,
        help="for Prometheus; 'off' for none (default: the next port, or a free one)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--precision",
        metavar="NAME",
        help="which graphs: fp32, int4, quill4, quill8 or fp16 (default: the bundle's fastest)",
    )
    _add_sizes(parser)
    add_protection(parser)
    parser.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the same seed gives the same tokens in any batch (batch invariance); --no-exact is "
        "faster for a lone request in int4 (default: exact)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM (default 30)",
    )
    parser.add_argument(
        "--watchdog",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="health says NOT_SERVING while a step takes longer (default 60)",
    )
    parser.add_argument(
        "--tracing",
        action="store_true",
        help="send OpenTelemetry spans; $OTEL_EXPORTER_OTLP_ENDPOINT says where to",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: an object a line, for machines (default text)",
    )
    parser.set_defaults(run="quill.server.serving:run", extra="serve")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-slots", type=positive, metavar="N", help="sequences that run at the same time"
    )
    parser.add_argument(
        "--context", type=positive, metavar="TOKENS", help="prompt and answer together"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="default: one a core")
    parser.add_argument(
        "--spinning",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="threads stay awake between steps, which is faster; --no-spinning is for cores that "
        "other programs keep busy too (default: spinning)",
    )
    parser.add_argument(
        "--queue",
        type=positive,
        default=256,
        metavar="N",
        help="requests that may wait; one more is refused (default 256)",
    )
    parser.add_argument(
        "--prefix-cache",
        type=natural,
        metavar="MB",
        help="memory for prompts that begin alike; 0 turns it off",
    )


def _add_generate(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue a text on a running server",
        description="Continues a text, and shows it as it is made.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads stdin")
    _add_asking(parser)
    parser.add_argument(
        "--chat", action="store_true", help="take the prompt for a user's message, and answer it"
    )
    parser.add_argument("--json", action="store_true", help="the whole answer as JSON, at the end")
    parser.set_defaults(run="quill.server.terminal:generate", extra="serve")


def _add_chat(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model on a running server",
        description="Talks with a model. Ctrl-C stops an answer; Ctrl-D, or /quit, ends the chat. "
        "Where neither you nor the model's author say how to draw, it is with temperature "
        f"{_CHAT_SAMPLING['temperature']}, top-p {_CHAT_SAMPLING['top_p']} and repetition penalty "
        f"{_CHAT_SAMPLING['repetition_penalty']}.",
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told beforehand")
    _add_asking(parser)
    parser.set_defaults(
        run="quill.server.terminal:chat", extra="serve", chat_sampling=_CHAT_SAMPLING
    )


def _add_asking(parser: argparse.ArgumentParser) -> None:
    add_access(parser)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="default: none")
    for name, kind, text in _SAMPLING:
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="ends the answer; may be given several times",
    )
    parser.add_argument(
        "--stop-token-id", action="append", type=int, metavar="ID", help="the same, by token id"
    )
    parser.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID:BIAS",
        help="added to a logit; several times",
    )
    _add_beams(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of a text")
    parser.add_argument("--echo", action="store_true", help="put the prompt before the answer")


def _add_beams(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--beams",
        type=positive,
        metavar="N",
        help="search with N beams instead of drawing; the answer comes whole, at the end",
    )
    parser.add_argument(
        "--length-penalty", type=float, metavar="N", help="above 0 favours long answers (default 1)"
    )
    parser.add_argument(
        "--early-stopping", choices=("at-once", "never"), help="when a search may end"
    )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't ID:BIAS, such as 42:-100") from None

"""The options of `quill generate` and `quill chat`: what is asked, and how tokens are chosen.

Knows: argparse. Does not know: requests; it imports no grpc.
"""

import argparse

from quill.server.cli.access_options import add_access
from quill.server.cli.argument_types import Subparsers, positive

# Where nothing is said of a default, it is the model's own, as its author wished.
_SAMPLING = (
    ("max-new-tokens", int, "at least 1 (default 256, or as many as fit)"),
    ("min-new-tokens", int, "no token ends the answer before so many (default 0)"),
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


def add_generate(subparsers: Subparsers) -> None:
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
    parser.set_defaults(run="quill.server.cli.generate:generate", extra="serve")


def add_chat(subparsers: Subparsers) -> None:
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
        run="quill.server.cli.chat:chat", extra="serve", chat_sampling=_CHAT_SAMPLING
    )


def _add_asking(parser: argparse.ArgumentParser) -> None:
    add_access(parser, many=True)
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
    _add_forms(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of a text")
    parser.add_argument("--echo", action="store_true", help="put the prompt before the answer")


def _add_forms(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--json-schema", metavar="FILE", help="the answer is JSON by the schema in this file"
    )
    forms.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    forms.add_argument("--regex", metavar="REGEX", help="which matches all of the answer")
    forms.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="the answer is one of these; several times",
    )
    forms.add_argument(
        "--grammar",
        metavar="FILE",
        help="the answer keeps to the grammar in this file (Lark, GBNF)",
    )


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

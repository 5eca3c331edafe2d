"""The arguments of `quill bench`. Imports nothing heavy: `--help` must answer at once."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_bench(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed, quality and memory, also of other programs",
        description="Measures tokens a second, beside perplexity and memory.",
    )
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    _add_engine(kinds)
    _add_guesses(kinds)
    _add_forms(kinds)
    _add_server(kinds)
    _add_streams(kinds)
    _add_cluster(kinds)
    _add_peers(kinds)
    _add_translate(kinds)
    _add_embed(kinds)
    _add_fidelity(kinds)
    _add_affinity(kinds)
    _add_fleet(kinds)


def _add_engine(kinds: "Subparsers") -> None:
    parser = kinds.add_parser("engine", help="prefill and decode steps, with no network")
    _add_common(parser)
    _add_rounds(parser)
    parser.add_argument(
        "--long",
        action="store_true",
        help="prompts of up to 8,000 tokens instead",
    )
    parser.set_defaults(run="quill.loadtest.bench.engine:run_engine", extra="loadtest")


def _add_guesses(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "speculative", help="what guessing from the text so far gains one row"
    )
    _add_common(parser)
    _add_rounds(parser, 3)
    parser.set_defaults(run="quill.loadtest.bench.guesses:run", extra="loadtest")


def _add_forms(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "structured",
        help="answers that keep to JSON schemas: valid, the same alone, as fast as free ones",
        description="Asks a server for answers to fifty JSON schemas in a crowd, validates them, "
        "asks some again alone, measures what forms cost, and sends hostile ones.",
    )
    _add_common(parser)
    _add_rounds(parser, 3)
    parser.add_argument(
        "--seeds", type=_positive, default=20, metavar="N", help="of each schema; default 20"
    )
    parser.add_argument(
        "--alone", type=_natural, default=500, metavar="N", help="asked again; default 500"
    )
    parser.add_argument(
        "--parts",
        default="answers,speed,hostile",
        metavar="NAMES",
        help="with commas; default answers,speed,hostile",
    )
    parser.set_defaults(run="quill.loadtest.bench.forms.run:run", extra="loadtest")


def _add_peers(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "peers",
        help="the same beside llama.cpp, onnxruntime-genai, CTranslate2 and transformers",
        description="Needs `make peers`, and SmolLM2 as `make serve` makes it.",
    )
    _add_common(parser)
    _add_rounds(parser)
    parser.add_argument(
        "--passages",
        type=_positive,
        default=16,
        metavar="N",
        help="to measure perplexity on, of 255 tokens each; default 16",
    )
    parser.set_defaults(run="quill.loadtest.bench.engine:run_peers", extra="loadtest")


def _add_translate(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "translate",
        help="a translation model, greedy and with beams, also beside CTranslate2",
        description="Translates a file's lines, greedily 16 at once and with 4 beams 8 at once.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a translation model's")
    parser.add_argument("sources", type=Path, metavar="FILE", help="a sentence a line")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="what the bundle was exported from: CTranslate2 gets its weights. Needs `make peers`",
    )
    parser.add_argument(
        "--peers-python", type=Path, metavar="PYTHON", help="default: that of `make peers`"
    )
    parser.add_argument("--precision", default="fp32", metavar="NAMES", help="default fp32")
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: one a core")
    parser.add_argument("--limit", type=_positive, default=200, metavar="N", help="default 200")
    _add_rounds(parser)
    parser.set_defaults(run="quill.loadtest.bench.translate:run", extra="loadtest")


def _add_embed(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "embed",
        help="an encoder's vectors, beside the same graph with padding and transformers",
        description="Embeds texts of mixed length, packed as Quill does, and in padded batches in "
        "the order of their arrival.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="an encoder's")
    parser.add_argument(
        "--texts", type=Path, metavar="FILE", help="a text a line (default: drawn by chance)"
    )
    parser.add_argument(
        "--transformers",
        type=Path,
        metavar="DIR",
        help="the Hugging Face directory that the bundle came from: one text after another",
    )
    parser.add_argument(
        "--batch", type=_positive, default=32, metavar="N", help="of the padded; default 32"
    )
    parser.add_argument("--precision", default="fp32", metavar="NAMES", help="default fp32")
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: one a core")
    parser.add_argument("--limit", type=_positive, default=1000, metavar="N", help="default 1000")
    _add_rounds(parser, 3)
    parser.set_defaults(run="quill.loadtest.bench.embed:run", extra="loadtest")


def _add_fidelity(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "reference",
        help="a served translation model against PyTorch, line by line, with BLEU",
        description="Serves a bundle, asks it what `quill eval RUN --answers FILE` asked PyTorch, "
        "by many users at once, and compares every token. With fp32 a difference is an error.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a translation model's")
    parser.add_argument("answers", type=Path, metavar="FILE", help="of `quill eval --answers`")
    parser.add_argument("--users", type=_positive, default=16, metavar="N", help="default 16")
    parser.add_argument("--precision", default="fp32", metavar="NAME", help="default fp32")
    parser.add_argument("--limit", type=_positive, metavar="N", help="the first N lines only")
    parser.set_defaults(run="quill.loadtest.bench.fidelity:run", extra="train")


def _add_server(kinds: "Subparsers") -> None:
    parser = kinds.add_parser("server", help="closed-loop users who stream, and peak memory")
    _add_common(parser)
    _add_rounds(parser, 3)
    parser.add_argument("--users", type=_positive, default=32, metavar="N", help="default 32")
    parser.add_argument(
        "--duration", type=float, default=20.0, metavar="SECONDS", help="of a round; default 20"
    )
    parser.add_argument(
        "--answer", type=_positive, default=64, metavar="TOKENS", help="of each answer; default 64"
    )
    parser.add_argument(
        "--context",
        type=_positive,
        default=256,
        metavar="TOKENS",
        help="of a request, without what is shared; default 256",
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a Quill of any version that stands there already; may be given several times",
    )
    parser.add_argument(
        "--shared-prefix",
        type=_natural,
        default=0,
        metavar="TOKENS",
        help="that all prompts begin with; default 0",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="default 0, which is greedy; above it tokens are drawn, and none is cut off",
    )
    parser.add_argument(
        "--protocols",
        action="store_true",
        help="also over HTTP and KServe v2, in turns, and compare",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also llama.cpp's llama-server, in turns. Needs `make peers`, and SmolLM2 as "
        "`make serve` makes it",
    )
    parser.set_defaults(run="quill.loadtest.bench.server:run", extra="loadtest")


def _add_streams(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "streams", help="gRPC against the bare engine, sampling, gaps, cancellation"
    )
    _add_common(parser)
    parser.add_argument("--streams", type=_positive, default=32, metavar="N", help="default 32")
    parser.add_argument(
        "--rounds", type=_positive, default=3, metavar="N", help="in turns; default 3"
    )
    parser.add_argument(
        "--long-prompt",
        type=_positive,
        default=4000,
        metavar="TOKENS",
        help="that is read while others stream or come; default 4000",
    )
    parser.set_defaults(run="quill.loadtest.bench.streams:run", extra="loadtest")


def _add_affinity(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "affinity",
        help="several servers: what it gains to ask the one that knows a prompt's beginning",
        description="Starts servers, asks them the scenario system-prompts with each way to "
        "balance (round-robin, affinity), in turns and of new servers every time, and "
        "tells hit rates, tokens a second and how even the load was.",
    )
    parser.add_argument(
        "bundle", nargs="?", type=Path, metavar="BUNDLE", help="default: smollm2-135m"
    )
    parser.add_argument("--precision", metavar="NAME", help="default: the fastest")
    parser.add_argument("--servers", type=_positive, default=3, metavar="N", help="default 3")
    parser.add_argument(
        "--threads", type=_positive, default=1, metavar="N", help="of each server; default 1"
    )
    parser.add_argument(
        "--kv-cache-mb",
        type=_positive,
        default=64,
        metavar="MB",
        help="of each server; enough for a third of the system prompts (default 64)",
    )
    parser.add_argument(
        "--context",
        type=_positive,
        default=2048,
        metavar="TOKENS",
        help="a cache has room for one at least (default 2048)",
    )
    parser.add_argument("--users", type=_positive, default=12, metavar="N", help="default 12")
    parser.add_argument(
        "--requests", type=_positive, default=400, metavar="N", help="in all; default 400"
    )
    parser.add_argument("--seed", type=_positive, default=1, metavar="N", help="default 1")
    _add_rounds(parser, 2)
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="write the results there too")
    parser.set_defaults(run="quill.loadtest.bench.fleet.affinity:run", extra="loadtest")


def _add_fleet(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "fleet",
        help="a hundred servers in simulated time, balanced in three ways",
        description="Simulates servers with the real scheduler and the clients' real balancing, "
        "and steps that take as long as measured ones. One server becomes slow, five die and come "
        "back. Tells goodput, times to first tokens and how even the load was, with a picture.",
    )
    add = parser.add_argument
    add("--replicas", type=_positive, default=100, metavar="N", help="default 100")
    add("--rate", type=_positive, default=50_000, metavar="N", help="calls a minute; default 50000")
    add("--duration", type=_positive, default=90, metavar="SECONDS",
        help="simulated; the first third only fills caches (default 90)")  # fmt: skip
    add("--apps", type=_positive, default=2000, metavar="N",
        help="applications, each with a system prompt (default 2000)")  # fmt: skip
    add("--skew", type=float, default=1.0, metavar="S",
        help="of their popularity, by Zipf's law; 0: all alike (default 1)")  # fmt: skip
    add("--clients", type=_positive, default=4, metavar="N",
        help="processes that balance, each by what it knows (default 4)")  # fmt: skip
    add("--seed", type=_positive, default=1, metavar="N", help="default 1")
    add("--out", type=Path, default=Path("runs/fleet"), metavar="DIRECTORY",
        help="gets the picture and the numbers (default runs/fleet)")  # fmt: skip
    parser.set_defaults(run="quill.loadtest.bench.fleet.fleet:run", extra="loadtest")


def _add_cluster(kinds: "Subparsers") -> None:
    parser = kinds.add_parser(
        "cluster",
        help="replicas on Ray against as many plain servers, in turns",
        description="Streams from replicas on Ray and from as many plain servers, in turns. Needs "
        "the extra cluster.",
    )
    _add_common(parser)
    _add_rounds(parser, 3)
    parser.add_argument("--replicas", type=_positive, default=2, metavar="N", help="default 2")
    parser.add_argument("--users", type=_positive, default=16, metavar="N", help="default 16")
    parser.add_argument(
        "--duration", type=float, default=10.0, metavar="SECONDS", help="of a round; default 10"
    )
    parser.add_argument(
        "--answer", type=_positive, default=64, metavar="TOKENS", help="of each answer; default 64"
    )
    parser.set_defaults(run="quill.loadtest.bench.cluster:run", extra="cluster")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle", nargs="?", type=Path, metavar="BUNDLE", help="default: smollm2-135m"
    )
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: one a core")
    parser.add_argument(
        "--precision",
        metavar="NAMES",
        help="with commas; default: all of the bundle's (server: its best)",
    )
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="write the results there too")


def _add_rounds(parser: argparse.ArgumentParser, usual: int = 5) -> None:
    text = f"the best counts; default {usual}"
    parser.add_argument("--rounds", type=_positive, default=usual, metavar="N", help=text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number from 0 up")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number from 1 up")
    return int(text)

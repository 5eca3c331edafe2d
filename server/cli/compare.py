"""`quill embed --compare`: how alike one word's vectors are across sentences, as a picture.

Knows: the client, where a word's tokens are, matplotlib. Does not know: networks, gRPC.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from quill.protos import generation_pb2 as pb
from quill.server.client.access import read_access
from quill.server.client.sync_client import Client
from quill.server.errors import ServerError

# N sentences · D model size

# Four with the fruit, and four with the brand.
# What the word means is said before it: a language model knows nothing of what follows.
SENTENCES = (
    "In the garden she picked a ripe red apple.",
    "He peeled the fruit and cut the apple.",
    "With sugar, flour and butter she baked the apple.",
    "On the tree in the orchard hung a green apple.",
    "The new phone was designed by apple.",
    "Shares of the technology company apple.",
    "He writes software for computers made by apple.",
    "Microsoft, Google and apple.",
)
CONTINUES = "##"  # before WordPiece's tokens within a word
DPI = 120
MAX_LABEL = 60

Similarities = npt.NDArray[np.float64]


def compare(args: argparse.Namespace) -> None:
    if not args.compare.strip():
        raise ServerError("--compare wants a word, such as apple; this one is empty")
    sentences = _sentences(args)
    out: Path = args.out or Path(f"{args.compare}.png")
    if out.suffix.lower() != ".png":
        raise ServerError(f"the picture is a PNG; {out} should end in .png")
    with Client(args.address, access=read_access(args)) as client:
        inputs = [find_word(client, args.compare, sentence) for sentence in sentences]
        answer = client.embed(inputs, pooling="mean", timeout_s=args.timeout)
    alike_NN = cosines([list(each.values) for each in answer.embeddings])
    figure = draw(alike_NN, sentences, f"“{args.compare}” in {answer.model}")
    try:
        figure.savefig(out, dpi=DPI)
    except OSError as error:
        raise ServerError(f"can't write the picture {out}: {error.strerror}") from error
    for sentence, alike_N in zip(sentences, alike_NN, strict=True):
        print(*(f"{each:5.2f}" for each in alike_N), sentence)
    print(f"picture: {out}")


def _sentences(args: argparse.Namespace) -> list[str]:
    given = list(args.texts)
    if args.sentences is not None:
        try:
            given += args.sentences.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ServerError(f"can't read {args.sentences}: {error}") from error
    sentences = [line.strip() for line in given or SENTENCES if line.strip()]
    missing = [line for line in sentences if args.compare.lower() not in line.lower()]
    if missing or len(sentences) < 2:
        told = f"{missing[0]!r} hasn't" if missing else f"{len(sentences)} isn't enough"
        raise ServerError(
            f"--compare {args.compare} needs two sentences or more that have the word: {told}. "
            "Give them as TEXTs, or with --sentences FILE"
        )
    return sentences


def find_word(client: Client, word: str, sentence: str) -> pb.EmbedInput:
    """The sentence, and the tokens of it that are the word."""
    ids = client.tokenize(sentence)
    piece_of = {token: client.detokenize([token]) for token in set(ids)}
    pieces = [piece_of[token] for token in ids]
    for start in range(len(pieces)):
        for stop in range(start + 1, len(pieces) + 1):
            if pieces[start].startswith(CONTINUES):
                break
            text = "".join(piece.removeprefix(CONTINUES) for piece in pieces[start:stop])
            if text.strip().lower() == word.lower():
                tokens, found = pb.TokenIds(ids=ids), pb.TokenRange(start=start, stop=stop)
                return pb.EmbedInput(token_ids=tokens, range=found)
    raise ServerError(f"{word!r} isn't a word of its own in {sentence!r}")


def cosines(vectors: Sequence[Sequence[float]]) -> Similarities:
    vectors_ND = np.array(vectors, np.float64)
    vectors_ND /= np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    alike_NN: Similarities = vectors_ND @ vectors_ND.T
    return alike_NN


def draw(alike_NN: Similarities, sentences: Sequence[str], title: str) -> Figure:
    num = len(sentences)
    labels = [each if len(each) <= MAX_LABEL else f"{each[: MAX_LABEL - 1]}…" for each in sentences]
    width = 2.5 + 0.08 * max(map(len, labels)) + 0.6 * num
    figure = Figure(figsize=(width, 1.5 + 0.6 * num), layout="constrained")
    axes = figure.subplots()
    least = float(alike_NN.min())
    image = axes.imshow(alike_NN, cmap="viridis", vmin=least, vmax=1.0)
    for row, alike_N in enumerate(alike_NN):
        for column, each in enumerate(alike_N):
            colour = "white" if each < (1 + least) / 2 else "black"
            axes.text(column, row, f"{each:.2f}", ha="center", va="center", color=colour, size=8)
    axes.set_yticks(range(num), labels, fontsize=9, parse_math=False)
    axes.set_xticks(range(num), [str(number + 1) for number in range(num)], fontsize=9)
    axes.set_title(title, fontsize=11, parse_math=False)
    figure.colorbar(image, ax=axes, label="cosine of the word's vectors", shrink=0.8)
    return figure

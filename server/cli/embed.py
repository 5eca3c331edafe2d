"""`quill embed` and `quill fill-mask`: an encoder in the terminal.

Knows: terminals, files of embeddings, the client, plots. Does not know: gRPC.
`quill embed --compare` plots the similarity of one word's embeddings across sentences.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.json_format import MessageToJson

from quill.protos import generation_pb2 as pb
from quill.server.cli.arguments import given_fields
from quill.server.cli.generate import open_client
from quill.server.client.options import EmbedOptions
from quill.server.client.sync_client import Client
from quill.server.errors import ServerError
from quill.server.fields import EMBED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_INPUTS = 2048  # of a call
MAX_BYTES = 1 << 21  # of its texts; a server's --max-message-bytes is twice that by default
# N sentences · D model size

# Four with the fruit, and four with the brand.
# The context stands before the word: a causal model knows nothing of what follows.
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


def embed(args: argparse.Namespace) -> None:
    if args.compare is not None:
        compare(args)
        return
    texts = _texts(args.texts)
    options = cast("EmbedOptions", given_fields(args, EMBED.values()))
    with open_client(args) as client:
        answers = [client.embed(some, timeout_s=args.timeout, **options) for some in _split(texts)]
    if args.json:
        for answer in answers:
            print(MessageToJson(answer, preserving_proto_field_name=True, ensure_ascii=False))
        return
    embeddings_ND = np.array(
        [each.values for answer in answers for each in answer.embeddings], np.float32
    )
    if args.out is None:
        for embedding_D in embeddings_ND:
            print(*embedding_D)
        return
    try:
        np.save(args.out, embeddings_ND)
    except OSError as error:
        raise ServerError(f"can't write {args.out}: {error.strerror}") from error


def _texts(given: Sequence[str]) -> list[str]:
    texts = [line.rstrip("\n") for line in sys.stdin] if list(given) == ["-"] else list(given)
    if not texts:
        raise ServerError("there is no text to embed. Give one, or - to read stdin")
    return texts


def _split(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Into as many as fit into a call."""
    start = num_bytes = 0
    for index, text in enumerate(texts):
        num_bytes += len(text.encode(errors="replace"))
        if index > start and (num_bytes > MAX_BYTES or index - start == MAX_INPUTS):
            yield texts[start:index]
            start, num_bytes = index, len(text.encode(errors="replace"))
    yield texts[start:]


def fill_mask(args: argparse.Namespace) -> None:
    text = sys.stdin.read() if args.text == "-" else args.text
    with open_client(args) as client:
        answer = client.fill_mask(text, top_k=args.top_k, timeout_s=args.timeout)
    if args.json:
        print(MessageToJson(answer, preserving_proto_field_name=True, ensure_ascii=False))
        return
    for number, mask in enumerate(answer.masks):
        if len(answer.masks) > 1:
            print(f"mask {number + 1}")
        _show(mask)


def _show(mask: pb.Mask) -> None:
    for candidate in mask.candidates:
        text = candidate.text if candidate.text.isprintable() else repr(candidate.text)
        print(f"{candidate.probability:8.2%}  {text}")


def compare(args: argparse.Namespace) -> None:
    args.extra = "train"  # which brings matplotlib
    if not args.compare.strip():
        raise ServerError("--compare needs a word, such as apple; this one is empty")
    sentences = _sentences(args)
    out: Path = args.out or Path(f"{args.compare}.png")
    if out.suffix.lower() != ".png":
        raise ServerError(f"the plot is a PNG; {out} should end in .png")
    with open_client(args) as client:
        inputs = [find_word(client, args.compare, sentence) for sentence in sentences]
        answer = client.embed(inputs, pooling="mean", timeout_s=args.timeout)
    similarity_NN = cosines([list(each.values) for each in answer.embeddings])
    figure = draw(similarity_NN, sentences, f"“{args.compare}” in {answer.model}")
    try:
        figure.savefig(out, dpi=DPI)
    except OSError as error:
        raise ServerError(f"can't write the plot {out}: {error.strerror}") from error
    for sentence, similarity_N in zip(sentences, similarity_NN, strict=True):
        print(*(f"{each:5.2f}" for each in similarity_N), sentence)
    print(f"picture: {out}")


def _sentences(args: argparse.Namespace) -> list[str]:
    given = _texts(args.texts) if args.texts else SENTENCES
    sentences = [line.strip() for line in given if line.strip()]
    missing = [line for line in sentences if args.compare.lower() not in line.lower()]
    if missing or len(sentences) < 2:
        problem = f"{missing[0]!r} hasn't" if missing else f"{len(sentences)} isn't enough"
        raise ServerError(
            f"--compare {args.compare} needs two sentences or more that have the word: {problem}. "
            "Give them as TEXTs"
        )
    return sentences


def find_word(client: Client, word: str, sentence: str) -> pb.EmbedInput:
    """The sentence, and the tokens of it that are the word."""
    ids = client.tokenize(sentence)
    text_of = {token: client.detokenize([token]) for token in set(ids)}
    texts = [text_of[token] for token in ids]
    for start in range(len(texts)):
        for stop in range(start + 1, len(texts) + 1):
            if texts[start].startswith(CONTINUES):
                break
            text = "".join(each.removeprefix(CONTINUES) for each in texts[start:stop])
            if text.strip().lower() == word.lower():
                tokens, found = pb.TokenIds(ids=ids), pb.TokenRange(start=start, stop=stop)
                return pb.EmbedInput(token_ids=tokens, range=found)
    raise ServerError(f"{word!r} isn't a word of its own in {sentence!r}")


def cosines(embeddings: Sequence[Sequence[float]]) -> Similarities:
    embeddings_ND = np.array(embeddings, np.float64)
    embeddings_ND /= np.linalg.norm(embeddings_ND, axis=1, keepdims=True)
    similarity_NN: Similarities = embeddings_ND @ embeddings_ND.T
    return similarity_NN


def draw(similarity_NN: Similarities, sentences: Sequence[str], title: str) -> "Figure":
    from matplotlib.figure import Figure

    num = len(sentences)
    labels = [each if len(each) <= MAX_LABEL else f"{each[: MAX_LABEL - 1]}…" for each in sentences]
    width = 2.5 + 0.08 * max(map(len, labels)) + 0.6 * num
    figure = Figure(figsize=(width, 1.5 + 0.6 * num), layout="constrained")
    axes = figure.subplots()
    least = float(similarity_NN.min())
    image = axes.imshow(similarity_NN, cmap="viridis", vmin=least, vmax=1.0)
    for row, similarity_N in enumerate(similarity_NN):
        for column, each in enumerate(similarity_N):
            color = "white" if each < (1 + least) / 2 else "black"
            axes.text(column, row, f"{each:.2f}", ha="center", va="center", color=color, size=8)
    axes.set_yticks(range(num), labels, fontsize=9, parse_math=False)
    axes.set_xticks(range(num), [str(number + 1) for number in range(num)], fontsize=9)
    axes.set_title(title, fontsize=11, parse_math=False)
    figure.colorbar(image, ax=axes, label="cosine similarity of the word's embeddings", shrink=0.8)
    return figure

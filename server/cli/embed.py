"""`quill embed` and `quill fill-mask`: an encoder in the terminal.

Knows: terminals, files of embeddings, the client. Does not know: gRPC, plots.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from google.protobuf.json_format import MessageToJson

from quill.protos import generation_pb2 as pb
from quill.server.cli.arguments import given_fields
from quill.server.client.access import read_access
from quill.server.client.options import EmbedOptions
from quill.server.client.sync_client import Client
from quill.server.errors import ServerError
from quill.server.fields import EMBED

MAX_INPUTS = 2048  # of a call
MAX_BYTES = 1 << 21  # of its texts; a server's --max-message-bytes is twice that by default


def embed(args: argparse.Namespace) -> None:
    if args.compare is not None:
        args.extra = "train"  # which brings matplotlib
        from quill.server.cli.compare import compare

        compare(args)
        return
    texts = _texts(args.texts)
    options = cast("EmbedOptions", given_fields(args, EMBED.values()))
    with Client(args.address, access=read_access(args)) as client:
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
    with Client(args.address, access=read_access(args)) as client:
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

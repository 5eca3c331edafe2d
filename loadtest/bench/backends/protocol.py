"""The protocol between a benchmark and a backend under test, and the loop that serves it.

Knows: the lines on the pipe. Does not know: any backend, what the numbers are for.

Each backend runs in a process of its own: two versions of one runtime, or two OpenMP libraries,
can't share one. The benchmark writes a line of JSON, {"do": "prefill", "ids": […]}, and reads one
back; between two lines a backend is idle. A backend is an object with `info` and a method for each
workload that it supports, which returns seconds, a dict or a dataclass:

    prefill(ids)                          seconds to read a prompt and choose one token, greedily
    decode(ids, num_seqs, num_steps)      seconds of so many steps of sequences with one prompt
    score(passages, reference) -> Score   of all tokens but each first one (score_passages)
    translate(sources, num_beams, num_at_once) -> Translated
    embed(texts) -> Embedded
    load(prompts, num_users, num_new, …)  closed-loop users of a server (workload/closed_loop.py)
    memory() -> bytes                     the peak, where it isn't this process's
"""

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quill.export.verify.token_scores import kl_divergence, score_sequence

MAX_NEW_TOKENS = 127  # of a translation


@dataclass(frozen=True)
class BackendInfo:
    name: str
    kind: str  # of weights
    version: str
    weight_bytes: int


@dataclass(frozen=True)
class Score:
    """Of so many tokens, in nats: the summed negative log-likelihood, and the summed KL divergence
    from the reference; None if there is no reference, or not all of the backend's logits."""

    nll: float
    num_tokens: int
    kld: float | None = None


@dataclass(frozen=True)
class Translated:
    """All translations in the order of their sources, without EOS, and their total time."""

    seconds: float
    answers: list[list[int]]


@dataclass(frozen=True)
class Embedded:
    """The mean embeddings of all texts in their order, and their total time."""

    seconds: float
    vectors: list[list[float]]


class Backend(Protocol):
    info: BackendInfo


def serve(backend: Backend) -> None:
    """Answers lines until there are no more."""
    reply, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # libraries print; only answers may be on the pipe
    print(json.dumps(asdict(backend.info)), file=reply, flush=True)
    for line in sys.stdin:
        try:
            answer = _answer(backend, json.loads(line))
        except Exception as error:  # reported to the benchmark
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=reply, flush=True)


def _answer(backend: Backend, order: dict[str, Any]) -> dict[str, Any]:
    method = order.pop("do")
    if method == "memory":
        measure = getattr(backend, "memory", own_peak_bytes)
        return {"peak_bytes": measure()}
    answer = getattr(backend, method)(**order)
    if isinstance(answer, float):
        return {"seconds": answer}
    return answer if isinstance(answer, dict) else asdict(answer)


def own_peak_bytes() -> int:
    """The peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def size_of(path: Path) -> int:
    """Of a file, or of all files in a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def model_arguments(arguments: Sequence[str]) -> tuple[Path, str, int]:
    """The command line of most backends: PATH KIND THREADS."""
    return Path(arguments[1]), arguments[2], int(arguments[3])


# T tokens · V vocabulary

Logits = npt.NDArray[Any]


def score_passages(
    passages: Sequence[Sequence[int]],
    reference: str | None,
    logits_of: Callable[[Sequence[int]], Logits],
) -> Score:
    """How well logits predict text, and how near they are to float32's: `prepare` wrote those to a
    file, after each token but each passage's last. `logits_of` gives those after each token of a
    passage; after the last one, they may lack. The file isn't read as a whole: it may be larger
    than all models."""
    expected_TV = None if reference is None else np.load(reference, mmap_mode="r")
    nll, kld, num_tokens = 0.0, 0.0, 0
    for ids in passages:
        first, num_tokens = num_tokens, num_tokens + len(ids) - 1
        logits_TV = np.asarray(logits_of(ids)[: len(ids) - 1], np.float32)
        nll += float(score_sequence(logits_TV, ids).nll.sum())
        if expected_TV is not None:
            kld += float(kl_divergence(logits_TV, expected_TV[first:num_tokens]).sum())
    return Score(nll, num_tokens, None if expected_TV is None else kld)

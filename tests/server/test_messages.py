"""What crosses between a frontend and the engine's process: the same value at the other end."""

import socket
from typing import Any

import numpy as np
import pytest

from quill.server import errors
from quill.server.frames import MAX_FRAME_BYTES, Frames, pack, receive
from quill.server.outputs import (
    Alternative,
    EmbeddingEvent,
    EngineOutputs,
    Event,
    FailEvent,
    FinishEvent,
    HypothesisEvent,
    PositionLogprobs,
    PromptEvent,
    QueueStats,
    StartEvent,
    StepStats,
    Timings,
    TokenEvent,
    Usage,
)
from quill.server.process.messages import (
    TO_ENGINE,
    TO_FRONTEND,
    End,
    Outputs,
    Submit,
    frame,
)
from quill.server.request import BeamParams, Constraint, PoolingParams, Request, SamplingParams

LOGPROBS = PositionLogprobs(3, None, (Alternative(3, -0.5), Alternative(4, float("-inf"))))
EVENTS: list[Event] = [
    StartEvent("r", 3),
    PromptEvent("r", (LOGPROBS,)),
    TokenEvent("r", 1, 5, LOGPROBS),
    HypothesisEvent("r", 0, (1, 2), ()),
    FinishEvent("r", 0, "eos", 2**64 - 1, Usage(1, 0, 2, 3, 4), Timings(1.5, 0.0, 2.5), -0.25),
]


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_ids": (1, 2), "seed": 2**64 - 1, "deadline_s": 1e9, "stop_ids": frozenset({7})},
        {"prompt_ids": (1,), "source_ids": (3, 4), "beams": BeamParams(num_beams=3)},
        {"prompt_ids": (1,), "sampling": SamplingParams(logit_bias={5: -1.5}), "logprobs": 3},
        {"prompt_ids": (1,), "constraint": Constraint("regex", "[a-z]é")},
        {"pooling": PoolingParams(texts=((1, 2), (3,)), ranges=(range(1, 2), range(1)))},
    ],
)
def test_requests_arrive_as_they_were_sent(options: dict[str, Any]) -> None:
    max_new_tokens = 0 if "pooling" in options else 4
    request = Request(request_id="r", max_new_tokens=max_new_tokens, **options)
    (body,) = Frames().feed(frame(Submit(request, 2.5)))
    assert TO_ENGINE.decode(body) == Submit(request, 2.5)


def test_events_and_numbers_of_a_step_arrive_as_they_were_sent() -> None:
    step = StepStats("mixed", 0.25, 9, num_preempted=1, masks_s=0.5)
    sent = Outputs(EngineOutputs(tuple(EVENTS), step, QueueStats(1, 2, 3, 4)))
    (body,) = Frames().feed(frame(sent))
    assert TO_FRONTEND.decode(body) == sent


def test_embeddings_keep_their_bits() -> None:
    vector = np.array([1.5, -0.0, 1e-40], np.float32)
    (body,) = Frames().feed(frame(Outputs(EngineOutputs((EmbeddingEvent("r", 2, vector),), None))))
    (event,) = TO_FRONTEND.decode(body).outputs.events
    assert event.text == 2
    assert event.vector_D.tobytes() == vector.tobytes()


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidFieldError("constraint.regex", "has no end"),
        errors.OverloadedError("the queue is full", 1.5),
        errors.StepError("a step failed"),
    ],
)
def test_errors_keep_their_kind_their_text_and_their_fields(error: errors.RequestError) -> None:
    (body,) = Frames().feed(frame(Outputs(EngineOutputs((FailEvent("r", error),), None))))
    (event,) = TO_FRONTEND.decode(body).outputs.events
    received = event.error
    assert (type(received), str(received)) == (type(error), str(error))
    assert vars(received) == vars(error)


def test_frames_may_come_in_any_pieces() -> None:
    messages = [End("a", None, "cancelled"), End("b", 3, "stop")]
    stream = b"".join(map(frame, messages))
    for size in range(1, len(stream)):
        frames = Frames()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [
            TO_ENGINE.decode(body) for piece in pieces for body in frames.feed(piece)
        ] == messages


def test_one_frame_is_received_whole_and_a_closed_connection_is_an_error() -> None:
    here, there = socket.socketpair()
    with here:
        with there:
            there.sendall(pack(b"constraint"))
            assert receive(here) == b"constraint"
            there.sendall(pack(b"half")[:-1])
        with pytest.raises(EOFError):
            receive(here)


def test_length_beyond_all_that_we_send_is_a_bug() -> None:
    header = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames().feed(header))

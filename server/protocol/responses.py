"""What clients are told, as protobuf.

Knows: generation.proto, chunks. Does not know: how they came about, gRPC.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import metadata

import numpy as np
import numpy.typing as npt

from quill.protos import generation_pb2 as pb
from quill.server.outputs import FinishReason, PositionLogprobs, Timings, Usage
from quill.server.protocol.answer import Chunk
from quill.server.protocol.requests import ParsedRequest
from quill.server.protocol.served_model import ServedModel
from quill.server.request import Pooling
from quill.server.text.tokenizer import Text
from quill.server.tools import merge_deltas

# N texts · D model size, or as many of its numbers as were asked for
Vectors = npt.NDArray[np.float32]

_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "eos": pb.FINISH_REASON_EOS,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "deadline": pb.FINISH_REASON_DEADLINE,
}
_FAMILIES = {
    "causal": pb.FAMILY_CAUSAL,
    "seq2seq": pb.FAMILY_SEQ2SEQ,
    "encoder": pb.FAMILY_ENCODER,
}
_POOLINGS: dict[Pooling, pb.Pooling] = {
    "mean": pb.POOLING_MEAN,
    "first": pb.POOLING_FIRST,
    "last": pb.POOLING_LAST,
}


def chunk_message(chunk: Chunk, text: Text | None) -> pb.GenerateChunk:
    message = pb.GenerateChunk(
        sequence=chunk.sequence,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=logprobs_messages(chunk.logprobs, text),
        prompt_logprobs=logprobs_messages(chunk.prompt_logprobs, text),
        tool_calls=[pb.ToolCallDelta(**vars(each)) for each in chunk.calls],
    )
    if chunk.finish is not None:
        message.finish_reason = _REASONS[chunk.finish.reason]
        message.usage.CopyFrom(_usage(chunk.finish.usage))
        message.seed = chunk.finish.seed
        message.timings.CopyFrom(timings_message(chunk.finish.timings))
        message.request_id = chunk.finish.request_id
        if chunk.finish.score is not None:
            message.score = chunk.finish.score
    return message


def response_message(sequences: Sequence[Chunk], text: Text | None) -> pb.GenerateResponse:
    """`sequences`: whole answers, one chunk each."""
    finishes = [each.finish for each in sequences if each.finish is not None]
    first = finishes[0]
    usages = [finish.usage for finish in finishes]
    last = max(finishes, key=lambda finish: finish.timings.total_ms)
    return pb.GenerateResponse(
        sequences=[_sequence(each, text) for each in sequences],
        prompt_logprobs=logprobs_messages(sequences[0].prompt_logprobs, text),
        usage=_usage(
            replace(
                first.usage,
                generated=sum(each.generated for each in usages),
                draft=sum(each.draft for each in usages),
                accepted=sum(each.accepted for each in usages),
            )
        ),
        seed=first.seed,
        timings=timings_message(last.timings),
        request_id=first.request_id,
    )


def _sequence(whole: Chunk, text: Text | None) -> pb.Sequence:
    assert whole.finish is not None
    return pb.Sequence(
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=_REASONS[whole.finish.reason],
        logprobs=logprobs_messages(whole.logprobs, text),
        seed=whole.finish.seed,
        score=whole.finish.score,
        tool_calls=[
            pb.ToolCall(id=each.id, name=each.name, arguments=each.arguments)
            for each in merge_deltas(whole.calls)
        ],
    )


def logprobs_messages(
    logprobs: Iterable[PositionLogprobs], text: Text | None
) -> list[pb.TokenLogprobs]:
    def piece(token_id: int) -> str:
        return "" if text is None else text.piece(token_id)

    def spelled(token_id: int) -> bytes:
        return b"" if text is None else text.spelled(token_id)

    return [
        pb.TokenLogprobs(
            token_id=each.token_id,
            logprob=each.logprob,
            text=piece(each.token_id),
            top=[
                pb.Alternative(token_id=id, logprob=logprob, text=piece(id), bytes=spelled(id))
                for id, logprob in each.top
            ],
            bytes=spelled(each.token_id),
        )
        for each in logprobs
    ]


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        generated_tokens=usage.generated,
        draft_tokens=usage.draft,
        accepted_draft_tokens=usage.accepted,
    )


def timings_message(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue_ms=timings.queue_ms,
        first_token_ms=timings.first_token_ms,
        total_ms=timings.total_ms,
    )


def embed_response(whole: Chunk, parsed: ParsedRequest, served: ServedModel) -> pb.EmbedResponse:
    """Takes long for many texts: not for the event loop."""
    assert whole.finish is not None
    assert parsed.request.pooling is not None
    vectors_ND = np.stack([whole.vectors[text] for text in range(len(whole.vectors))])
    vectors_ND = shaped(vectors_ND, parsed.dimensions, parsed.normalize)
    return pb.EmbedResponse(
        embeddings=[
            pb.Embedding(values=vector_D.tolist(), num_tokens=len(text))
            for vector_D, text in zip(vectors_ND, parsed.request.pooling.texts, strict=True)
        ],
        usage=_usage(whole.finish.usage),
        timings=timings_message(whole.finish.timings),
        request_id=whole.finish.request_id,
        model=served.manifest.name,
    )


def shaped(vectors_ND: Vectors, dimensions: int | None, normalize: bool) -> Vectors:
    """Cut, then scaled to the length 1. Each as if it were alone, in one order of sums."""
    vectors_ND = vectors_ND[:, :dimensions]
    if not normalize:
        return vectors_ND
    wide_ND = vectors_ND.astype(np.float64)
    lengths_N1 = np.sqrt(np.add.accumulate(wide_ND**2, axis=1)[:, -1:])
    return (wide_ND / np.where(lengths_N1 == 0, 1, lengths_N1)).astype(np.float32)


def fill_response(whole: Chunk, parsed: ParsedRequest, served: ServedModel) -> pb.FillMaskResponse:
    assert whole.finish is not None
    assert parsed.request.pooling is not None
    masks = parsed.request.pooling.masks
    return pb.FillMaskResponse(
        masks=[
            pb.Mask(position=place, fillings=_fillings(each, served.text))
            for place, each in zip(masks, whole.prompt_logprobs, strict=True)
        ],
        usage=_usage(whole.finish.usage),
        timings=timings_message(whole.finish.timings),
        request_id=whole.finish.request_id,
        model=served.manifest.name,
    )


def _fillings(logprobs: PositionLogprobs, text: Text | None) -> list[pb.Filling]:
    return [
        pb.Filling(
            token_id=id,
            probability=math.exp(min(logprob, 0.0)),
            text="" if text is None else text.piece(id),
        )
        for id, logprob in logprobs.top
    ]


def model_message(served: ServedModel) -> pb.Model:
    manifest = served.manifest
    return pb.Model(
        name=manifest.name,
        family=_FAMILIES[manifest.family],
        precision=served.graphs.precision,
        device=served.device,
        server_version=metadata.version("quill"),
        runtime_version=served.runtime_version,
        deterministic=served.deterministic,
        num_parameters=manifest.sizes.num_parameters,
        vocab_size=served.vocab_size,
        bos_token_id=manifest.special_tokens.bos,
        eos_token_ids=manifest.stop_ids,
        chat_template=manifest.chat_template or "",
        has_tokenizer=served.text is not None,
        defaults=served.sampling_defaults,
        context=served.context,
        default_max_new_tokens=served.default_max_new_tokens,
        max_num_seqs=served.max_num_seqs,
        max_num_sequences=served.max_num_sequences,
        max_num_beams=served.max_num_beams,
        max_waiting=served.max_waiting,
        max_message_bytes=served.max_message_bytes,
        embedding_size=manifest.sizes.d_model if served.gives_vectors else 0,
        default_pooling=_POOLINGS[served.default_pooling] if served.gives_vectors else None,
        default_normalize=manifest.normalize,
        mask_token_id=served.mask,
        mask_token=_mask_text(served),
        tool_call_format=_tool_form(served),
    )


def _tool_form(served: ServedModel) -> str:
    form = None if served.template is None else served.template.tool_call_format
    return "" if form is None or served.grammars is None else form.name


def _mask_text(served: ServedModel) -> str:
    if served.mask is None or served.text is None:
        return ""
    return served.text.piece(served.mask)

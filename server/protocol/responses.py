"""What clients are told, as protobuf.

Knows: generation.proto, chunks. Does not know: how they came about, gRPC.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import metadata

from quill.protos import generation_pb2 as pb
from quill.server.events import FinishReason, PositionLogprobs, Timings, Usage
from quill.server.protocol.answer import Chunk
from quill.server.protocol.served_model import ServedModel
from quill.server.text.tokenizer import Text

_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "eos": pb.FINISH_REASON_EOS,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "deadline": pb.FINISH_REASON_DEADLINE,
}
_FAMILIES = {"causal": pb.FAMILY_CAUSAL, "seq2seq": pb.FAMILY_SEQ2SEQ}


def chunk_message(chunk: Chunk, text: Text | None) -> pb.GenerateChunk:
    message = pb.GenerateChunk(
        sequence=chunk.sequence,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=logprobs_messages(chunk.logprobs, text),
        prompt_logprobs=logprobs_messages(chunk.prompt_logprobs, text),
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
                guessed=sum(each.guessed for each in usages),
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
    )


def logprobs_messages(
    logprobs: Iterable[PositionLogprobs], text: Text | None
) -> list[pb.TokenLogprobs]:
    def piece(token_id: int) -> str:
        return "" if text is None else text.piece(token_id)

    return [
        pb.TokenLogprobs(
            token_id=each.token_id,
            logprob=each.logprob,
            text=piece(each.token_id),
            top=[
                pb.Alternative(token_id=id, logprob=logprob, text=piece(id))
                for id, logprob in each.top
            ],
        )
        for each in logprobs
    ]


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        generated_tokens=usage.generated,
        guessed_tokens=usage.guessed,
        accepted_tokens=usage.accepted,
    )


def timings_message(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue_ms=timings.queue_ms,
        first_token_ms=timings.first_token_ms,
        total_ms=timings.total_ms,
    )


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
        max_rows=served.max_rows,
        max_num_sequences=served.max_num_sequences,
        max_num_beams=served.max_num_beams,
        max_waiting=served.max_waiting,
        max_message_bytes=served.max_message_bytes,
    )

"""generation.proto's messages, read and written: the gRPC frontend's parser and printer.

Knows: protobuf, specs, results. Does not know: gRPC, how answers come about, limits.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.fields import (
    EMBED,
    FAMILY,
    FILL_MASK,
    FINISH_REASON,
    GENERATE,
    POOLING,
    SCORE,
    TOOL_MODE,
    Choices,
    Field,
)
from quill.server.frontend.answer import Chunk, Result, whole_embeddings
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import (
    ChatMessage,
    ConstraintSpec,
    Conversation,
    EmbedInput,
    EmbedSpec,
    GenerateSpec,
    ParsedRequest,
    Prompt,
    ToolCall,
    ToolChoice,
    ToolSpec,
    choice_constraint,
    object_constraint,
)
from quill.server.outputs import PositionLogprobs, Timings, Usage
from quill.server.text.tokenizer import Text
from quill.server.tools import merge_deltas


def _numbers(choices: Choices) -> dict[str, Any]:
    return {value: getattr(pb, choices.proto_name(value)) for value in choices.values}


_REASONS = _numbers(FINISH_REASON)
_FAMILIES = _numbers(FAMILY)
_POOLINGS = _numbers(POOLING)


def read_generate(message: pb.GenerateRequest) -> GenerateSpec:
    return GenerateSpec(
        prompt=_generate_prompt(message),
        options=_options(message, GENERATE),
        constraint=_constraint(message.constraint) if message.HasField("constraint") else None,
        tools=[
            ToolSpec(f"tools[{number}]", each.name, each.description, each.parameters)
            for number, each in enumerate(message.tools)
        ],
        tool_choice=_tool_choice(message.tool_choice),
        parallel_tool_calls=message.parallel_tool_calls
        or not message.HasField("parallel_tool_calls"),
    )


def read_score(message: pb.ScoreRequest) -> GenerateSpec:
    return GenerateSpec(prompt=_text_or_ids(message), options=_options(message, SCORE))


def read_fill_mask(message: pb.FillMaskRequest) -> GenerateSpec:
    return GenerateSpec(prompt=_text_or_ids(message), options=_options(message, FILL_MASK))


def read_embed(message: pb.EmbedRequest) -> EmbedSpec:
    inputs = [
        EmbedInput(
            _text_or_ids(each, f"inputs[{number}]."),
            f"inputs[{number}]",
            (each.range.start, each.range.stop) if each.HasField("range") else None,
        )
        for number, each in enumerate(message.inputs)
    ]
    return EmbedSpec(inputs=inputs, options=_options(message, EMBED))


def _options(message: Any, table: Mapping[str, Field]) -> dict[str, Any]:
    """The options that are set; of fields without presence, those that aren't zero or empty."""
    options: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        field = table.get(descriptor.name)
        if field is None:
            continue
        if field.choices is not None:
            options[field.name] = _choice(field.name, value, field.choices)
        elif field.type == "bias":
            options[field.name] = dict(value)
        else:
            options[field.name] = list(value) if field.is_list else value
    return options


def _choice(name: str, number: int, choices: Choices) -> str:
    for value, known in _numbers(choices).items():
        if number == known:
            return value
    names = ", ".join(map(choices.proto_name, choices.values))
    raise InvalidFieldError(name, f"is {number}; known are {names}")


def _generate_prompt(message: pb.GenerateRequest) -> Prompt | None:
    kind = message.WhichOneof("input")
    if kind == "prompt":
        return Prompt(kind, message.prompt)
    if kind == "prompt_ids":
        return Prompt(kind, message.prompt_ids.ids)
    if kind == "messages":
        messages = enumerate(message.messages.messages)
        return Prompt(kind, Conversation([_message(number, each) for number, each in messages]))
    return None


def _message(number: int, message: pb.Message) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=tuple(
            ToolCall(f"messages[{number}].tool_calls[{place}]", each.id, each.name, each.arguments)
            for place, each in enumerate(message.tool_calls)
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _text_or_ids(
    message: pb.ScoreRequest | pb.FillMaskRequest | pb.EmbedInput, path: str = ""
) -> Prompt | None:
    kind = message.WhichOneof("input")
    if kind is None:
        return None
    return Prompt(f"{path}{kind}", message.text if kind == "text" else message.token_ids.ids)


def _constraint(message: pb.Constraint) -> ConstraintSpec:
    kind = message.WhichOneof("kind")
    if kind is None:
        kinds = "json_schema, json_object, regex, choice or lark"
        raise InvalidFieldError("constraint", f"is empty: give {kinds}")
    field = f"constraint.{kind}"
    if kind == "choice":
        return choice_constraint(field, message.choice.choices)
    if kind == "json_object":
        return object_constraint(field, message.json_object)
    return ConstraintSpec(kind, getattr(message, kind))


def _tool_choice(message: pb.ToolChoice) -> ToolChoice:
    if not message.mode:
        return ToolChoice(names=tuple(message.names))
    mode: Any = _choice("tool_choice.mode", message.mode, TOOL_MODE)
    return ToolChoice(mode, tuple(message.names))


def chunk_message(chunk: Chunk, text: Text | None) -> pb.GenerateChunk:
    message = pb.GenerateChunk(sequence=chunk.sequence, text=chunk.text, token_ids=chunk.token_ids)
    if chunk.logprobs or chunk.prompt_logprobs:
        message.logprobs.extend(logprobs_messages(chunk.logprobs, text))
        message.prompt_logprobs.extend(logprobs_messages(chunk.prompt_logprobs, text))
    for each in chunk.calls:
        message.tool_calls.add(**vars(each))
    if chunk.finish is not None:
        message.finish_reason = _REASONS[chunk.finish.reason]
        message.usage.CopyFrom(_usage(chunk.finish.usage))
        message.seed = chunk.finish.seed
        message.timings.CopyFrom(_timings(chunk.finish.timings))
        message.request_id = chunk.finish.request_id
        if chunk.finish.score is not None:
            message.score = chunk.finish.score
    return message


def response_message(result: Result, text: Text | None) -> pb.GenerateResponse:
    first = result.finishes[0]
    return pb.GenerateResponse(
        sequences=[_sequence(each, text) for each in result.sequences],
        prompt_logprobs=logprobs_messages(result.sequences[0].prompt_logprobs, text),
        usage=_usage(result.usage),
        seed=first.seed,
        timings=_timings(result.timings),
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
    def spelled(id: int) -> dict[str, Any]:
        return {} if text is None else {"text": text.piece(id), "bytes": text.spelled(id)}

    return [
        pb.TokenLogprobs(
            token_id=each.token_id,
            logprob=each.logprob,
            top=[
                pb.Alternative(token_id=id, logprob=logprob, **spelled(id))
                for id, logprob in each.top
            ],
            **spelled(each.token_id),
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


def _timings(timings: Timings) -> pb.Timings:
    return pb.Timings(**msgspec.structs.asdict(timings))


def score_response(whole: Chunk, text: Text | None) -> pb.ScoreResponse:
    assert whole.finish is not None
    return pb.ScoreResponse(
        log_likelihood=sum(each.logprob or 0.0 for each in whole.prompt_logprobs),
        tokens=logprobs_messages(whole.prompt_logprobs, text),
        timings=_timings(whole.finish.timings),
        request_id=whole.finish.request_id,
    )


def tokenize_response(ids: Sequence[int], text: Text) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(token_ids=ids, tokens=map(text.piece, ids))


def _end(whole: Chunk, served: ServedModel) -> dict[str, Any]:
    assert whole.finish is not None
    return {
        "usage": _usage(whole.finish.usage),
        "timings": _timings(whole.finish.timings),
        "request_id": whole.finish.request_id,
        "model": served.name,
    }


def embed_response(parsed: ParsedRequest, whole: Chunk, served: ServedModel) -> pb.EmbedResponse:
    """Takes long for many texts: not for the event loop."""
    assert parsed.request.pooling is not None
    return pb.EmbedResponse(
        embeddings=[
            pb.Embedding(values=embedding_D.tolist(), num_tokens=len(text))
            for embedding_D, text in zip(
                whole_embeddings(parsed, whole), parsed.request.pooling.texts, strict=True
            )
        ],
        **_end(whole, served),
    )


def fill_mask_response(
    parsed: ParsedRequest, whole: Chunk, served: ServedModel
) -> pb.FillMaskResponse:
    assert parsed.request.pooling is not None
    return pb.FillMaskResponse(
        masks=[
            pb.Mask(position=place, candidates=_candidates(each, served.text))
            for place, each in zip(parsed.request.pooling.masks, whole.prompt_logprobs, strict=True)
        ],
        **_end(whole, served),
    )


def _candidates(logprobs: PositionLogprobs, text: Text | None) -> list[pb.MaskCandidate]:
    return [
        pb.MaskCandidate(
            token_id=id,
            probability=math.exp(min(logprob, 0.0)),
            text="" if text is None else text.piece(id),
        )
        for id, logprob in logprobs.top
    ]


def model_message(served: ServedModel) -> pb.Model:
    manifest = served.manifest
    call_form = None if served.template is None else served.template.tool_call_format
    mask_text = (
        None if served.mask is None or served.text is None else served.text.piece(served.mask)
    )
    return pb.Model(
        name=served.name,
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
        max_num_beams=served.max_num_sequences,
        max_waiting=served.max_waiting,
        max_message_bytes=served.max_message_bytes,
        embedding_size=manifest.sizes.d_model if served.gives_embeddings else 0,
        default_pooling=_POOLINGS[served.default_pooling] if served.gives_embeddings else None,
        default_normalize=manifest.normalize,
        mask_token_id=served.mask,
        mask_token=mask_text,
        tool_call_format=call_form.name if call_form and served.grammars else "",
        fingerprint=served.fingerprint,
    )

"""Turns Embed and FillMask into a Request, or says which field is wrong and why.

Knows: protobuf, the limits of generation.proto, which models can do either.
Does not know: gRPC, the engine.
"""

from collections.abc import Sequence

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError, UnimplementedError, UnsupportedError
from quill.server.protocol.prompt_fields import PromptReader, check_allowed
from quill.server.protocol.requests import Arrival, ParsedRequest
from quill.server.protocol.served_model import ServedModel
from quill.server.request import Pooling, PoolingParams, Request

MAX_INPUTS = 2048
MAX_MASKS = 64  # logits are wanted for each
DEFAULT_TOP_K = 5
MAX_TOP_K = 20

_POOLINGS: dict[int, Pooling] = {
    pb.POOLING_MEAN: "mean",
    pb.POOLING_FIRST: "first",
    pb.POOLING_LAST: "last",
}


class ReadingReader:
    """Reads requests for one model. May take long for long texts: not for the event loop."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._prompts = PromptReader(served)

    def read_embed(self, message: pb.EmbedRequest, arrival: Arrival) -> ParsedRequest:
        served = self._served
        self._check_embeds()
        # From the quickest check to the longest: the texts are read last.
        pooling = self._pooling(message.pooling)
        dimensions = self._dimensions(message)
        if not 1 <= len(message.inputs) <= MAX_INPUTS:
            rule = f"it must have from 1 to {MAX_INPUTS}"
            raise InvalidFieldError("inputs", f"has {len(message.inputs)} entries; {rule}")
        texts = tuple(
            self._read_input(each, f"inputs[{number}].", arrival)
            for number, each in enumerate(message.inputs)
        )
        reading = PoolingParams(texts=texts, method=pooling, ranges=_ranges(message.inputs, texts))
        is_given = message.HasField("normalize")
        return ParsedRequest(
            request=_request(reading, message.priority, arrival),
            normalize=message.normalize if is_given else served.manifest.normalize,
            dimensions=dimensions,
        )

    def read_fill(self, message: pb.FillMaskRequest, arrival: Arrival) -> ParsedRequest:
        mask = self._mask()
        top_k = message.top_k if message.HasField("top_k") else DEFAULT_TOP_K
        if not 1 <= top_k <= MAX_TOP_K:
            raise InvalidFieldError("top_k", f"is {top_k}; it must be from 1 to {MAX_TOP_K}")
        ids = self._read_input(message, "", arrival, mask)
        masks = tuple(place for place, token in enumerate(ids) if token == mask)
        if not 1 <= len(masks) <= MAX_MASKS:
            field, text = message.WhichOneof("input") or "input", self._served.text
            name = f"the token {mask}" if text is None else f"{text.piece(mask)} (token {mask})"
            rule = f"{name} must be in it from 1 to {MAX_MASKS} times"
            raise InvalidFieldError(field, f"has {len(masks)} masks; {rule}")
        reading = PoolingParams(texts=(ids,), masks=masks)
        request = _request(reading, message.priority, arrival, top_k)
        return ParsedRequest(request=request, prompt_logprobs=top_k)

    def _check_embeds(self) -> None:
        served = self._served
        if served.is_translator:
            raise UnimplementedError(
                "a translation model doesn't embed texts. Serve an encoder or a causal model"
            )
        if not served.gives_vectors and served.device != "cpu":
            raise UnsupportedError(
                "vectors come from graphs for the CPU only. Serve the bundle with --device cpu"
            )
        if not served.gives_vectors:
            raise UnsupportedError(
                "this bundle's graphs give no hidden states: an older version made them. Export "
                "the bundle again"
            )

    def _mask(self) -> int:
        if not self._served.is_encoder:
            raise UnimplementedError(
                "only encoders fill masks. This model continues or translates its input: Generate"
            )
        if self._served.mask is None:
            raise UnsupportedError("this model has no mask token, so there is nothing to fill")
        return self._served.mask

    def _pooling(self, given: int) -> Pooling:
        if given == pb.POOLING_UNSPECIFIED:
            return self._served.default_pooling
        if given not in _POOLINGS:
            known = ", ".join(map(pb.Pooling.Name, _POOLINGS))
            raise InvalidFieldError("pooling", f"is {given}; known are {known}")
        return _POOLINGS[given]

    def _dimensions(self, message: pb.EmbedRequest) -> int | None:
        if not message.HasField("dimensions"):
            return None
        most = self._served.manifest.sizes.d_model
        if not 1 <= message.dimensions <= most:
            rule = f"this model's vectors have {most} numbers, so it must be from 1 to {most}"
            raise InvalidFieldError("dimensions", f"is {message.dimensions}; {rule}")
        return message.dimensions

    def _read_input(
        self,
        message: pb.EmbedInput | pb.FillMaskRequest,
        path: str,
        arrival: Arrival,
        mask: int | None = None,
    ) -> tuple[int, ...]:
        kind = message.WhichOneof("input")
        if kind is None:
            raise InvalidFieldError(f"{path}input", "is missing: give text or token_ids")
        field = f"{path}{kind}"
        if kind == "token_ids":
            ids = list(message.token_ids.ids)
            self._prompts.check_ids(field, ids)
        elif mask is None:
            ids = self._prompts.encode(message.text, field)
        else:
            ids = self._prompts.encode_masked(message.text, field, mask)
        most = self._served.context
        if not 1 <= len(ids) <= most:
            raise InvalidFieldError(field, f"has {len(ids)} tokens; it must have from 1 to {most}")
        check_allowed(field, len(ids), arrival.max_prompt_tokens)
        return tuple(ids)


def _ranges(inputs: Sequence[pb.EmbedInput], texts: Sequence[tuple[int, ...]]) -> tuple[range, ...]:
    ranges = []
    for number, (each, text) in enumerate(zip(inputs, texts, strict=True)):
        given, all_ = each.range, range(len(text))
        if each.HasField("range") and not 0 <= given.start < given.stop <= len(text):
            raise InvalidFieldError(
                f"inputs[{number}].range",
                f"is from {given.start} to {given.stop}; the input has {len(text)} tokens, of "
                "which it must hold at least one",
            )
        ranges.append(all_[given.start : given.stop] if each.HasField("range") else all_)
    return tuple(ranges)


def _request(
    pooling: PoolingParams, priority: int, arrival: Arrival, num_fillings: int | None = None
) -> Request:
    return Request(
        request_id=arrival.request_id,
        pooling=pooling,
        max_new_tokens=0,
        prompt_logprobs=num_fillings,
        priority=priority,
        deadline_s=arrival.deadline_s,
        owner=arrival.owner,
        cache_scope=arrival.cache_scope,
    )

"""Checks what a client asks for and makes the engine's Request of it, or names the wrong field.

Knows: the table of fields, which options go together, what each kind of model can do.
Does not know: wires, the engine. Ranges stand in server/fields.py.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quill.server.errors import InvalidFieldError, UnimplementedError, UnsupportedError
from quill.server.fields import (
    EMBED,
    FILL_MASK,
    GENERATE,
    MAX_SEED,
    SAMPLING,
    SCORE,
    Field,
)
from quill.server.frontend.constraints import read_constraint, read_tools
from quill.server.frontend.prompts import PromptReader
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import (
    EmbedInput,
    EmbedSpec,
    GenerateSpec,
    ParsedRequest,
    ToolUse,
)
from quill.server.request import BeamParams, Constraint, PoolingParams, Request, SamplingParams

MAX_INPUTS = 2048
MAX_MASKS = 64  # logits are computed for each
_TEXT_OR_IDS = ("input", "text or token_ids")


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What is known of a request beside its message."""

    request_id: str
    deadline_s: float | None  # on the engine's clock
    owner: str = ""
    cache_scope: str = ""
    max_prompt_tokens: int | None = None  # the caller's own limit

    def request(self, priority: int, **rest: Any) -> Request:
        return Request(
            request_id=self.request_id,
            priority=priority,
            deadline_s=self.deadline_s,
            owner=self.owner,
            cache_scope=self.cache_scope,
            **rest,
        )


class RequestReader:
    """Reads requests for one model. May take long for long texts: not for the event loop."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._prompts = PromptReader(served)

    def read_generate(self, spec: GenerateSpec, arrival: Arrival) -> ParsedRequest:
        if self._served.is_encoder:
            raise _generates_nothing(self._served)
        # From the quickest check to the longest: the prompt is read last.
        options = self._generate_options(spec)
        constraint = read_constraint(spec, options, self._served)
        tools = read_tools(spec, options, self._served)
        request = self._request(spec, options, arrival, tools, constraint)
        self._check_fits(request)
        return ParsedRequest(
            request=request,
            stop=tuple(options["stop"] or ()),
            echo=options["echo"],
            logprobs=options["logprobs"],
            prompt_logprobs=options["prompt_logprobs"],
            tools=tools,
            names=spec.names,
        )

    def _generate_options(self, spec: GenerateSpec) -> dict[str, Any]:
        served, given = self._served, spec.options
        limits = {
            "max_new_tokens": served.context,
            "num_sequences": served.max_num_sequences,
            "num_beams": served.max_num_sequences,
        }
        options = _checked(given, GENERATE, limits)
        if options["max_new_tokens"] is None:
            options["max_new_tokens"] = served.default_max_new_tokens
        if served.is_translator:
            _check_translation(given)
        self._prompts.check_ids("stop_token_ids", options["stop_token_ids"] or ())
        self._prompts.check_ids("logit_bias", options["logit_bias"] or {})
        return options

    def _request(
        self,
        spec: GenerateSpec,
        options: Mapping[str, Any],
        arrival: Arrival,
        tools: ToolUse | None,
        constraint: Constraint | None,
    ) -> Request:
        served, seed = self._served, options["seed"]
        beams = self._beams(spec.options, options)
        sampling = self._sampling(spec.options) if beams is None else SamplingParams()
        prompt_ids, source_ids = self._prompt(spec, arrival, tools)
        # The tokens of an echoed prompt have logprobs, too.
        wanted = (options["prompt_logprobs"], options["logprobs"] if options["echo"] else None)
        return arrival.request(
            options["priority"],
            prompt_ids=prompt_ids,
            source_ids=source_ids,
            sampling=sampling,
            beams=beams,
            constraint=constraint if tools is None else tools.constraint or constraint,
            seed=secrets.randbelow(MAX_SEED + 1) if seed is None else seed,
            max_new_tokens=options["max_new_tokens"],
            min_new_tokens=options["min_new_tokens"],
            eos_ids=frozenset(() if options["ignore_eos"] else served.manifest.stop_ids),
            stop_ids=frozenset(options["stop_token_ids"] or ()),
            num_sequences=options["num_sequences"],
            logprobs=options["logprobs"],
            prompt_logprobs=max((each for each in wanted if each is not None), default=None),
        )

    def _sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        chosen = {name: given[name] for name in SAMPLING if name in given}
        if chosen.get("top_k", 0) >= self._served.vocab_size:
            chosen["top_k"] = 0  # more than the vocabulary is the same as off
        return SamplingParams(**{**self._served.sampling_defaults, **chosen})

    def _beams(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> BeamParams | None:
        num_beams = options["num_beams"] or 1
        if num_beams == 1:
            for name in ("length_penalty", "early_stopping"):
                if name in given and (given[name] != "heuristic"):
                    raise InvalidFieldError(
                        name, "is set, and num_beams isn't above 1. Set it, too"
                    )
            return None
        _check_with_beams(given)
        self._check_vocabulary(num_beams, options)
        return BeamParams(
            num_beams=num_beams,
            length_penalty=options["length_penalty"],
            early_stopping=options["early_stopping"],
        )

    def _check_vocabulary(self, num_beams: int, options: Mapping[str, Any]) -> None:
        """The first step must find num_beams beams."""
        eos_ids = () if options["ignore_eos"] else self._served.manifest.stop_ids
        num_ends = len({*(options["stop_token_ids"] or ()), *eos_ids})
        most = self._served.vocab_size // max(2, 1 + num_ends)
        if num_beams > most:
            rule = f"with {num_ends} tokens that end an answer, this vocabulary allows {most}"
            raise InvalidFieldError("num_beams", f"is {num_beams}; {rule}")

    def _prompt(
        self, spec: GenerateSpec, arrival: Arrival, tools: ToolUse | None
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """A translation model reads the prompt as its source; its answer begins after bos."""
        served = self._served
        most = served.context if served.is_translator else served.context - 1
        ids = self._prompts.read(spec.prompt, (1, most), arrival.max_prompt_tokens, tools)
        if not served.is_translator:
            return ids, None
        bos = served.manifest.special_tokens.bos
        assert bos is not None, "loading rejects such a bundle"
        return (bos,), ids

    def _check_fits(self, request: Request) -> None:
        if request.min_new_tokens and len(request.all_stop_ids) == self._served.vocab_size:
            rule = "every token would end the answer, so none could be chosen before"
            raise InvalidFieldError("min_new_tokens", f"is {request.min_new_tokens}; {rule}")
        if not self._served.limits.fits(request):
            needed = f"{request.num_seqs} sequences or beams of so many tokens"
            rule = f"{needed} are more than this server has memory for. Ask for fewer of either"
            raise InvalidFieldError("max_new_tokens", f"is {request.max_new_tokens}; {rule}")

    def read_score(self, spec: GenerateSpec, arrival: Arrival) -> ParsedRequest:
        if self._served.is_encoder:
            raise _generates_nothing(self._served)
        if self._served.is_translator:
            raise UnimplementedError("a translation model can't score a text by itself")
        options = _checked(spec.options, SCORE)
        limits, most = (2, self._served.context), arrival.max_prompt_tokens
        ids = self._prompts.read(spec.prompt, limits, most, missing=_TEXT_OR_IDS)
        request = arrival.request(
            options["priority"], prompt_ids=ids, max_new_tokens=0, prompt_logprobs=0
        )
        return ParsedRequest(request=request, prompt_logprobs=0, names=spec.names)

    def read_embed(self, spec: EmbedSpec, arrival: Arrival) -> ParsedRequest:
        served = self._served
        _check_embeds(served)
        options = _checked(spec.options, EMBED, {"dimensions": served.manifest.sizes.d_model})
        if not 1 <= len(spec.inputs) <= MAX_INPUTS:
            rule = f"it must have from 1 to {MAX_INPUTS}"
            raise InvalidFieldError("inputs", f"has {len(spec.inputs)} entries; {rule}")
        limits, most = (1, served.context), arrival.max_prompt_tokens
        texts = tuple(
            self._prompts.read(
                each.prompt, limits, most, missing=(f"{each.field}.input", _TEXT_OR_IDS[1])
            )
            for each in spec.inputs
        )
        pooling = PoolingParams(
            texts=texts,
            method=options["pooling"] or served.default_pooling,
            ranges=_ranges(spec.inputs, texts),
        )
        normalize = options["normalize"]
        return ParsedRequest(
            request=arrival.request(options["priority"], pooling=pooling, max_new_tokens=0),
            normalize=served.manifest.normalize if normalize is None else normalize,
            dimensions=options["dimensions"],
            names=spec.names,
        )

    def read_fill_mask(self, spec: GenerateSpec, arrival: Arrival) -> ParsedRequest:
        served, mask = self._served, _mask(self._served)
        options = _checked(spec.options, FILL_MASK)
        limits, most = (1, served.context), arrival.max_prompt_tokens
        ids = self._prompts.read(spec.prompt, limits, most, mask=mask, missing=_TEXT_OR_IDS)
        masks = tuple(place for place, token in enumerate(ids) if token == mask)
        if not 1 <= len(masks) <= MAX_MASKS:
            assert spec.prompt is not None
            written = "" if served.text is None else f"{served.text.piece(mask)}, "
            rule = f"{written}token {mask}, must be in it from 1 to {MAX_MASKS} times"
            raise InvalidFieldError(spec.prompt.field, f"has {len(masks)} masks; {rule}")
        top_k = options["top_k"]
        request = arrival.request(
            options["priority"],
            pooling=PoolingParams(texts=(ids,), masks=masks),
            max_new_tokens=0,
            prompt_logprobs=top_k,
        )
        return ParsedRequest(request=request, prompt_logprobs=top_k, names=spec.names)


def _checked(
    given: Mapping[str, Any], table: Mapping[str, Field], limits: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """All options of a table, those that aren't given by their defaults."""
    for name, value in given.items():
        table[name].check(value, (limits or {}).get(name))
    return {name: field.default for name, field in table.items()} | dict(given)


def _check_translation(given: Mapping[str, Any]) -> None:
    if "prompt_logprobs" in given:
        raise InvalidFieldError("prompt_logprobs", "is set; a translation model has none of those")
    if given.get("echo"):
        raise InvalidFieldError("echo", "is set; a translation doesn't continue its prompt")


def _check_with_beams(given: Mapping[str, Any]) -> None:
    """Beam search samples nothing and changes no logits, and can't foresee a stop string."""
    for name in SAMPLING:
        field = GENERATE[name]
        neutral = 0 if name == "temperature" else field.default if field.off is None else field.off
        if given.get(name, neutral) not in (neutral, {}):
            reason = "is set, and beam search uses the model's own distribution"
            raise InvalidFieldError(name, f"{reason}. Leave out one of it and num_beams")
    if given.get("stop"):
        raise InvalidFieldError("stop", "is set, and beams only stop at tokens: use stop_token_ids")


def _check_embeds(served: ServedModel) -> None:
    if served.is_translator:
        raise UnimplementedError(
            "a translation model doesn't embed texts. Serve an encoder or a causal model"
        )
    if not served.gives_embeddings and served.device != "cpu":
        raise UnsupportedError(
            "embeddings come from graphs for the CPU only. Serve the bundle with --device cpu"
        )
    if not served.gives_embeddings:
        raise UnsupportedError(
            "this bundle's graphs give no hidden states: an older version made them. Export "
            "the bundle again"
        )


def _generates_nothing(served: ServedModel) -> UnimplementedError:
    calls = "Embed" if served.mask is None else "Embed and FillMask"
    return UnimplementedError(f"this model is an encoder, which generates nothing. It has {calls}")


def _mask(served: ServedModel) -> int:
    if not served.is_encoder:
        raise UnimplementedError(
            "only encoders fill masks. This model continues or translates its input: Generate"
        )
    if served.mask is None:
        raise UnsupportedError(
            "this encoder fills no masks: it has no head for masked tokens, or no mask token. It "
            "has Embed"
        )
    return served.mask


def _ranges(inputs: Sequence[EmbedInput], texts: Sequence[tuple[int, ...]]) -> tuple[range, ...]:
    ranges = []
    for each, text in zip(inputs, texts, strict=True):
        start, stop = each.range or (0, len(text))
        if not 0 <= start < stop <= len(text):
            raise InvalidFieldError(
                f"{each.field}.range",
                f"is from {start} to {stop}; the input has {len(text)} tokens, of which the range "
                "must hold at least one",
            )
        ranges.append(range(len(text))[start:stop])
    return tuple(ranges)

"""The model that is served, and the limits that clients may rely upon.

Knows: the manifest, the limits that the server was started with.
Does not know: who is being served, protobuf.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quill.export.bundle.manifest import Graphs, Manifest
from quill.export.precisions import Device
from quill.server.errors import InvalidFieldError, StartError
from quill.server.fields import MODEL_DEFAULTS
from quill.server.grammar.checker import GrammarChecker
from quill.server.request import Limits, Pooling, SamplingParams
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text

ALIAS = "quill"  # whatever is served
MAX_SEQUENCES = 16
DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One bundle, as it is served."""

    manifest: Manifest
    graphs: Graphs
    device: Device
    runtime_version: str
    deterministic: bool
    limits: Limits
    max_waiting: int
    max_message_bytes: int
    text: Text | None  # None: the model takes and gives token ids only
    template: ChatTemplate | None
    grammars: GrammarChecker | None = None  # None: it can't follow a constraint
    served_names: tuple[str, ...] = ()  # in place of the bundle's

    def __post_init__(self) -> None:
        try:
            SamplingParams(**self.sampling_defaults)
        except InvalidFieldError as error:
            raise StartError(f"the bundle's own default {error}. Export the bundle again") from None

    @property
    def name(self) -> str:
        """As it is reported."""
        return self.served_names[0] if self.served_names else self.manifest.name

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it; ALIAS is for scripts that are written before a server is."""
        return (*(self.served_names or (self.manifest.name,)), ALIAS)

    @cached_property
    def fingerprint(self) -> str:
        """The bundle's name, a hash of the files that are served, the precision."""
        served = {*self.graphs.file_names, self.manifest.tokenizer}
        hashes = sorted(each.sha256 for each in self.manifest.files if each.name in served)
        digest = hashlib.sha256("".join(hashes).encode()).hexdigest()
        return f"{self.manifest.name}-{digest[:8]}-{self.graphs.precision}"

    @property
    def labels(self) -> dict[str, str]:
        """Of the metric `quill_model_info`."""
        return {
            "model": self.name,
            "family": self.manifest.family,
            "precision": self.graphs.precision,
            "device": self.device,
            "runtime": f"onnxruntime {self.runtime_version}",
        }

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.limits.context

    @property
    def max_num_seqs(self) -> int:
        return self.limits.max_num_seqs

    @property
    def vocab_size(self) -> int:
        return self.manifest.sizes.vocab_size

    @property
    def is_translator(self) -> bool:
        """Whether it reads its input with an encoder, instead of continuing it."""
        return self.manifest.family == "seq2seq"

    @property
    def is_encoder(self) -> bool:
        """Whether it generates nothing."""
        return self.manifest.family == "encoder"

    @property
    def gives_embeddings(self) -> bool:
        return self.is_encoder or self.graphs.hidden

    @property
    def default_pooling(self) -> Pooling:
        return self.manifest.pooling or "mean"

    @property
    def mask(self) -> int | None:
        """The token that FillMask fills; None: the model has none, or no head for masked tokens."""
        return self.manifest.special_tokens.mask if self.is_encoder else None

    @property
    def max_num_sequences(self) -> int:
        """Of one request: answers, or beams."""
        return min(self.max_num_seqs, MAX_SEQUENCES)

    @property
    def default_max_new_tokens(self) -> int:
        wanted = self.manifest.generation.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        return max(1, min(int(wanted), self.context))

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The bundle's own, by field name; what isn't here is off."""
        generation = self.manifest.generation
        return {name: generation[name] for name in MODEL_DEFAULTS if name in generation}

"""The shape of a network: one frozen value that defines the network.

Knows: which settings exist and which go together.
Does not know: tensors, training, where a checkpoint comes from.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from quill.json_records import RecordError, from_json
from quill.model.errors import ConfigError

Family = Literal["causal", "seq2seq", "encoder"]
Positions = Literal["sinusoidal", "learned", "rotary", "none"]
Norm = Literal["layer", "rms"]
NormPlacement = Literal["pre", "post", "sandwich", "output"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]
QueryKeyNorm = Literal["none", "head", "width"]
Scoring = Literal["softmax", "sigmoid"]
ScalingKind = Literal["linear", "llama3", "yarn", "longrope"]
ClassActivation = Literal["tanh", "relu"]
CellKind = Literal["rnn", "gru", "lstm"]
ContextKind = Literal["fixed", "bahdanau"]

# Far above any network there is. A config out of nowhere must not take all memory, or for ever.
MAX_LAYERS = 2**10
MAX_CONTEXT = 2**22
MAX_HEADS = 2**16
MAX_SIZE = 2**24
MAX_EXPERTS = 2**12
MAX_TAPS = 16  # of a short convolution: the positions of a block
STATE_SIZE = 16  # a convolution's inputs are kept in the KV cache as heads of this size


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Stretches rotary positions beyond the context that a model was first trained with."""

    kind: ScalingKind
    factor: float
    low_freq_factor: float = 1.0  # of yarn: beta_slow
    high_freq_factor: float = 4.0  # of yarn: beta_fast
    original_context: int = 8192
    divisors: tuple[float, ...] = ()  # of longrope: of each frequency
    attention_factor: float = 1.0  # of yarn and longrope: cosines and sines are multiplied by it
    truncate: bool = True  # of yarn: blended over whole frequencies

    def __post_init__(self) -> None:
        _check_choices(self)
        positive = (*self.divisors, self.attention_factor)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ConfigError("rotary scaling has a divisor or a factor that isn't positive")
        if (self.kind == "longrope") != bool(self.divisors):
            raise ConfigError("longrope has a divisor for each frequency, and nothing else has")
        if not (math.isfinite(self.factor) and self.factor >= 1.0):
            raise ConfigError(f"rotary scaling factor is {self.factor}; it must be at least 1")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rotary scaling has low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}; 0 < low < high is needed"
            )
        if self.original_context < 1:
            raise ConfigError(f"original_context is {self.original_context}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A network without self-attention: what it has read is a state, one token after another."""

    cell: CellKind
    context: ContextKind  # what is known of the source: its last state, or attention to all states

    def __post_init__(self) -> None:
        _check_choices(self)


# What a recurrent network doesn't have, and what stands there instead.
NOT_RECURRENT: dict[str, object] = {
    "family": "seq2seq",
    "num_heads": 1,
    "num_kv_heads": 1,
    "positions": "none",
    "norm": "layer",
    "norm_placement": "pre",
    "activation": "relu",
    "qkv_bias": False,
    "attention_out_bias": False,
    "ff_bias": False,
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture in the place of a feed-forward: a router chooses a few experts for each token."""

    number: int
    per_token: int
    d_expert: int  # the feed-forward size of one
    num_shared: int = 0  # that every token has besides, as one of so many times the size
    shared_gate: bool = False  # these are multiplied by a sigmoid that is computed of the token
    scoring: Scoring = "softmax"
    normalize: bool = True  # a token's weights are divided by their sum
    scale: float = 1.0  # and multiplied by this
    groups: int = 1  # a token's experts come from `top_groups` of so many groups
    top_groups: int = 1
    group_best: int = 1  # a group is as good as so many of its best experts together
    balanced: bool = False  # a bias for each, adjusted by its load, is added to its score
    dense_layers: int = 0  # the first so many have a plain feed-forward
    bias: bool = False  # of the router, and of each expert's matrices
    clamp: float = 0.0  # of a clamped SwiGLU, (value + 1) · gate · σ(slope · gate); 0: a plain one
    slope: float = 1.702

    def __post_init__(self) -> None:
        _check_choices(self)
        _require_within(self, "number", 1, MAX_EXPERTS)
        _require_within(self, "groups", 1, self.number)
        if self.number % self.groups:
            raise ConfigError(f"{self.number} experts can't be cut into {self.groups} groups")
        _require_within(self, "top_groups", 1, self.groups)
        _require_within(self, "group_best", 1, self.number // self.groups)
        _require_within(self, "per_token", 1, self.number // self.groups * self.top_groups)
        _require_within(self, "d_expert", 1, MAX_SIZE)
        _require_within(self, "num_shared", 0, MAX_EXPERTS)
        _require_within(self, "dense_layers", 0, MAX_LAYERS)
        for name in ("scale", "slope"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} of the experts is {value}; it must be positive")
        if not (math.isfinite(self.clamp) and self.clamp >= 0):
            raise ConfigError(f"clamp of the experts is {self.clamp}; it must be positive, or 0")


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention: all heads' keys and values are made of one small vector, and
    that is what is kept of a token, with one key of positions for all heads."""

    rank: int  # of the latent
    query_rank: int = 0  # queries come through a bottleneck of this size; 0: they don't
    rope_size: int  # of a head's rotary part
    nope_size: int  # of the part that isn't
    value_size: int  # of a head's values

    def __post_init__(self) -> None:
        for name in ("rank", "rope_size", "nope_size", "value_size"):
            _require_within(self, name, 1, MAX_HEADS)
        _require_within(self, "query_rank", 0, MAX_SIZE)


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """Layers with a gated causal convolution over a few tokens in the place of attention."""

    taps: int  # tokens of a sum, the newest included
    layers: tuple[int, ...]
    bias: bool = False

    def __post_init__(self) -> None:
        _require_within(self, "taps", 1, MAX_TAPS)
        if not self.layers or sorted(set(self.layers)) != list(self.layers):
            raise ConfigError(
                f"short_conv has the layers {list(self.layers)}; it needs one at least, each once, "
                "in their order"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything needed to build the network; nothing needed only to train it."""

    family: Family
    vocab_size: int
    context: int  # the longest sequence, in tokens, on each side
    d_model: int
    num_layers: int  # of the decoder; 0 for an encoder
    num_encoder_layers: int = 0
    num_heads: int
    num_kv_heads: int  # fewer than num_heads: each K/V head serves a group of query heads
    head_size: int
    d_ff: int
    positions: Positions
    norm: Norm
    norm_placement: NormPlacement = "pre"
    activation: Activation
    qkv_bias: bool = False
    attention_out_bias: bool = False
    ff_bias: bool = False
    dropout: float = 0.0  # on embeddings and on each sublayer's output, as in the paper
    tied_embeddings: bool = True
    output_bias: bool = False  # a bias of each token's logit
    scale_embeddings: bool = False  # multiply embeddings by sqrt(d_model), as in the paper
    norm_eps: float = 1e-5
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    num_segments: int = 0  # BERT's token types: each has a vector that is added; 0: there are none
    embedding_norm: bool = False  # a norm after the sum of embeddings
    masked_head: bool = False  # dense, activation and norm before an encoder's projection
    recurrence: Recurrence | None = None  # not a Transformer, but what there was before it
    # Later additions, which aren't written at their defaults: older versions read such files.
    qk_norm: QueryKeyNorm = "none"  # an RMS norm of queries and keys: of each head, or of all
    window: int = 0  # a token sees so many, itself included; 0: all of its past
    window_pattern: int = 0  # every so many layers one sees all in spite of it; 0: none does
    local_rotary_base: float | None = None  # of layers with a window; None: as the others'
    attention_scale: float | None = None  # of scores; None: one over the root of the head size
    attention_soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they don't
    logit_soft_cap: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None
    embedding_scale: float | None = None  # of embeddings; None: as scale_embeddings has it
    residual_scale: float = 1.0  # what a sublayer adds is multiplied by it
    nope_pattern: int = 0  # every so many layers one has no rotary positions; 0: all have
    partial_rotary_size: int = 0  # only the last so many numbers of a head are turned; 0: all
    parallel_residual: bool = False  # the feed-forward reads what attention reads
    attention_sinks: bool = False  # each head has a learned score with a weight and no value
    short_conv: ShortConv | None = None
    relative_buckets: int = 0  # each head adds a number to scores by distance: so many; 0: none
    relative_distance: int = 128  # from which on all distances have the same number
    num_classes: int = 0  # an encoder's logits are of so many classes of texts; 0: of tokens
    class_activation: ClassActivation = "tanh"  # of the layer before these

    def __post_init__(self) -> None:
        _check_choices(self)
        self._check_sizes()
        self._check_combinations()
        self._check_later()

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "d_model", "d_ff"):
            _require_within(self, name, 1, MAX_SIZE)
        for name in ("num_heads", "num_kv_heads", "head_size"):
            _require_within(self, name, 1, MAX_HEADS)
        _require_within(self, "context", 1, MAX_CONTEXT)
        _require_within(self, "num_layers", int(self.family != "encoder"), MAX_LAYERS)
        _require_within(self, "num_encoder_layers", 0, MAX_LAYERS)
        _require_within(self, "num_segments", 0, MAX_SIZE)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        for name in ("norm_eps", "rotary_base"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; it must be a positive number")

    def _check_combinations(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads can't be shared out among {self.num_kv_heads} "
                "K/V heads; num_heads must be a multiple of num_kv_heads"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ConfigError(f"rotary positions need an even head size, not {self.head_size}")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ConfigError(f"sinusoidal positions need an even d_model, not {self.d_model}")
        if self.rotary_scaling is not None and self.positions != "rotary":
            raise ConfigError(f"rotary_scaling is set but positions are {self.positions}")
        if (self.family == "causal") == (self.num_encoder_layers > 0):
            raise ConfigError(
                f"a {self.family} model with {self.num_encoder_layers} encoder layers; "
                "seq2seq and encoder need at least one, causal has none"
            )
        if self.family == "encoder" and self.num_layers:
            raise ConfigError(
                f"an encoder with {self.num_layers} decoder layers; its num_layers is 0, and "
                "num_encoder_layers is its number of layers"
            )
        if self.family != "encoder" and (self.num_segments or self.masked_head):
            raise ConfigError(
                f"a {self.family} model with num_segments {self.num_segments} and masked_head "
                f"{self.masked_head}; only an encoder has segments and a masked head"
            )
        if self.recurrence is not None:
            self._check_recurrence()
        elif self.positions == "none" and not self.relative_buckets:
            raise ConfigError(
                "positions is 'none'; only a recurrent network knows the order of tokens without, "
                "or one with relative_buckets"
            )

    def _check_recurrence(self) -> None:
        """A state is one head as wide as the network."""
        wanted = NOT_RECURRENT | {"head_size": self.d_model, "d_ff": self.d_model}
        for name, value in wanted.items():
            if (found := getattr(self, name)) != value:
                raise ConfigError(f"{name} is {found}; in a recurrent network it must be {value}")
        if self.d_model % 2:
            raise ConfigError(
                f"d_model is {self.d_model}; a recurrent encoder reads in both directions and "
                "needs an even number"
            )

    def _check_later(self) -> None:
        _require_within(self, "window", 0, MAX_CONTEXT)
        _require_within(self, "window_pattern", 0, MAX_LAYERS)
        for name in ("attention_soft_cap", "logit_soft_cap"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value}; it must be a positive number, or 0 for none")
        for name in ("attention_scale", "local_rotary_base"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; it must be a positive number or null")
        if self.window == 0 and (self.window_pattern or self.local_rotary_base is not None):
            raise ConfigError("window_pattern and local_rotary_base need a window, which is 0")
        if self.local_rotary_base is not None and self.positions != "rotary":
            raise ConfigError(f"local_rotary_base is set but positions are {self.positions}")
        later = [name for name in _CAUSAL_ONLY if getattr(self, name) != _DEFAULTS[name]]
        if self.family != "causal" and later:
            raise ConfigError(f"a {self.family} model has {', '.join(later)}; only causal ones can")
        if self.experts is not None and (self.activation != "swiglu" or self.ff_bias):
            raise ConfigError("experts need the activation swiglu, and no ff_bias")
        if self.latent is not None:
            self._check_latent(self.latent)
        self._check_last()

    def _check_last(self) -> None:
        _require_within(self, "nope_pattern", 0, MAX_LAYERS)
        _require_within(self, "partial_rotary_size", 0, self.head_size)
        for name in ("embedding_scale", "residual_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; it must be a positive number")
        turned = self.nope_pattern or self.partial_rotary_size
        if turned and (self.positions != "rotary" or self.latent is not None):
            raise ConfigError("nope_pattern and partial_rotary_size need plain rotary positions")
        if self.partial_rotary_size % 2:
            raise ConfigError(f"partial_rotary_size is {self.partial_rotary_size}; it must be even")
        if self.short_conv is not None:
            self._check_short_conv(self.short_conv)
        if self.parallel_residual and self.norm_placement != "pre":
            raise ConfigError("parallel_residual needs the norm_placement 'pre'")
        _require_within(self, "num_classes", 0, MAX_SIZE)
        if self.num_classes and (self.family != "encoder" or self.masked_head or self.output_bias):
            raise ConfigError("only an encoder without masked_head and output_bias has num_classes")
        if self.relative_buckets:
            self._check_relative()
        divisors = () if self.rotary_scaling is None else self.rotary_scaling.divisors
        if divisors and len(divisors) != self.rotary_size // 2:
            raise ConfigError(
                f"rotary scaling has {len(divisors)} divisors for {self.rotary_size // 2} "
                "frequencies"
            )

    def _check_short_conv(self, conv: ShortConv) -> None:
        if not 0 <= conv.layers[0] <= conv.layers[-1] < self.num_layers:
            raise ConfigError(
                f"short_conv has the layers {list(conv.layers)}; there are {self.num_layers}"
            )
        if self.d_model % (2 * STATE_SIZE) or self.latent is not None:
            raise ConfigError(
                f"short_conv needs a d_model that is a multiple of {2 * STATE_SIZE}, not "
                f"{self.d_model}, and no latent attention"
            )

    def _check_relative(self) -> None:
        _require_within(self, "relative_buckets", 4, MAX_HEADS)
        _require_within(self, "relative_distance", self.relative_buckets, MAX_CONTEXT)
        if self.relative_buckets % 4 or self.family == "causal" or self.recurrence is not None:
            raise ConfigError(
                f"relative_buckets is {self.relative_buckets} in a {self.family} model; it must be "
                "a multiple of 4, in an encoder or a seq2seq Transformer"
            )

    def _check_latent(self, latent: Latent) -> None:
        if self.head_size != latent.nope_size + latent.rope_size:
            raise ConfigError(
                f"head_size is {self.head_size}; with latent attention it is nope_size + "
                f"rope_size, {latent.nope_size + latent.rope_size}"
            )
        if self.num_kv_heads != self.num_heads or self.positions != "rotary":
            raise ConfigError("latent attention needs rotary positions and no groups of heads")
        others = self.qkv_bias or self.qk_norm != "none" or self.window or self.attention_sinks
        if latent.rope_size % 2 or others:
            raise ConfigError(
                "latent attention needs an even rope_size, and goes without qkv_bias, qk_norm, "
                "window and attention_sinks"
            )

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return self.head_size**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rotary_size(self) -> int:
        """The size of the rotary part, which is the last of a head."""
        if self.latent is not None:
            return self.latent.rope_size
        return self.partial_rotary_size or self.head_size

    @property
    def cached(self) -> "CachedSizes":
        """The sizes of a token's KV cache in each layer with attention."""
        if self.latent is None:
            return CachedSizes(self.num_kv_heads, self.head_size, self.head_size)
        return CachedSizes(1, self.latent.rank + self.latent.rope_size, self.latent.rank)

    def is_conv(self, layer: int) -> bool:
        return self.short_conv is not None and layer in self.short_conv.layers

    def cached_of(self, layer: int) -> "CachedSizes":
        """Of a layer: one with a short convolution keeps its inputs, half of them as keys."""
        if not self.is_conv(layer):
            return self.cached
        return CachedSizes(self.d_model // (2 * STATE_SIZE), STATE_SIZE, STATE_SIZE)

    def window_of(self, layer: int) -> int:
        """The sliding window of a layer; 0: none."""
        sees_all = self.window_pattern and (layer + 1) % self.window_pattern == 0
        return 0 if sees_all else self.window

    def is_rotary(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        without = self.nope_pattern and (layer + 1) % self.nope_pattern == 0
        return self.positions == "rotary" and not without

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        for name in _LATER:
            if getattr(self, name) == _DEFAULTS[name]:
                del values[name]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Builds a config from JSON. An error names an unknown, missing or mistyped entry."""
        try:
            return from_json(cls, values)
        except RecordError as error:
            raise ConfigError(f"the model's config: {error}") from error


class CachedSizes(NamedTuple):
    """How many K/V heads a cache has, and how wide its keys and values are."""

    num_heads: int
    key_size: int
    value_size: int


_Part = RotaryScaling | Recurrence | Experts | Latent | ShortConv
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
_LATER = list(_DEFAULTS)[list(_DEFAULTS).index("rotary_scaling") + 1 :]
_CAUSAL_ONLY = (
    *("qk_norm", "window", "attention_soft_cap", "logit_soft_cap"),
    *("experts", "latent", "residual_scale", "nope_pattern", "parallel_residual"),
    *("attention_sinks", "short_conv"),
)


def _check_choices(config: ModelConfig | _Part) -> None:
    for name, hint in get_type_hints(type(config)).items():
        choices = get_args(hint)
        if not all(isinstance(choice, str) for choice in choices) or not choices:
            continue
        value = getattr(config, name)
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _require_within(config: ModelConfig | _Part, name: str, least: int, most: int) -> None:
    value = getattr(config, name)
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value}; it must be from {least} to {most}")

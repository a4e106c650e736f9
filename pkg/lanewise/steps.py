"""Steps: what a Sampler does to a row of logits, each a small frozen object; and the lists that projects make of them.

Numbers are checked when a step is made. A step keeps no state: what a sequence carries belongs to the Sampler.
docs/samplers.md has the formula of each.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, ParamSpec, TypeAlias

import numpy as np

from . import _ops
from .params import SamplingParams

Over: TypeAlias = Literal["both", "output", "prompt"]
Ties: TypeAlias = Literal["lowest", "all"]
_OVERS = ("both", "output", "prompt")


# ---- what fields are told ----


def _real(step: Any, name: str, low: float, high: float, *, least: bool = True, most: bool = True) -> None:
    """A number between low and high, which it may be or not."""
    value = getattr(step, name)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{type(step).__name__}: {name} must be a number, got {value!r}") from None
    if not (low <= number if least else low < number) or not (number <= high if most else number < high):
        left, right = "[" if least and low > -math.inf else "(", "]" if most and high < math.inf else ")"
        raise ValueError(f"{type(step).__name__}: {name} must be in {left}{low:g}, {high:g}{right}, got {value}")
    if math.isinf(number) and not (least and number == low) and not (most and number == high):
        raise ValueError(f"{type(step).__name__}: {name} must be finite, got {value}")
    object.__setattr__(step, name, number)


def _whole(step: Any, name: str, low: int = 0, high: int = 2**31 - 1) -> None:
    value = getattr(step, name)
    if isinstance(value, bool):
        raise TypeError(f"{type(step).__name__}: {name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{type(step).__name__}: {name} must be an integer, got {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{type(step).__name__}: {name} must be in [{low}, {high}], got {value}")
    object.__setattr__(step, name, number)


def _window(step: Any, name: str = "last_n") -> None:
    if getattr(step, name) is not None:
        _whole(step, name)


def _choice(step: Any, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(step, name)
    if not isinstance(value, str) or value not in choices:
        said = ", ".join(map(repr, choices))
        raise ValueError(f"{type(step).__name__}: {name} must be one of {said}, got {value!r}")


def _flag(step: Any, name: str) -> None:
    value = getattr(step, name)
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{type(step).__name__}: {name} must be True or False, got {value!r}")
    object.__setattr__(step, name, bool(value))


def _one_id(owner: str, name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be an id, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be an id, got {value!r}") from None
    if not 0 <= number < 2**31:
        raise ValueError(f"{owner}: {name} must be an id, got {value}")
    return number


def _id_list(owner: str, name: str, value: Any) -> tuple[int, ...]:
    """One id, or some."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return (_one_id(owner, name, value),)
    return tuple(_one_id(owner, f"{name}[{i}]", one) for i, one in enumerate(value))


def _ids(step: Any, name: str) -> None:
    object.__setattr__(step, name, _id_list(type(step).__name__, name, getattr(step, name)))


def _bias(owner: str, what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{owner}: the bias of {what} must be a number, got {value!r}") from None
    if math.isnan(number) or number > float(np.finfo(np.float32).max):
        raise ValueError(f"{owner}: the bias of {what} must be a number or -inf, got {value}")
    return number


def _pairs(owner: str, name: str, value: Any) -> list[tuple[Any, Any]]:
    try:
        return list(value.items() if isinstance(value, Mapping) else [(key, to) for key, to in value])
    except (TypeError, ValueError):
        raise TypeError(f"{owner}: {name} must be a dict, got {value!r}") from None


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a Sampler's list. Equal steps compare and hash alike."""

    # how a plan has it: "edit" of single logits, "program" for the kernel of truncations and draws, "row" as a whole
    _kind: ClassVar[str] = ""


class _Edit(Step):
    __slots__ = ()
    _kind = "edit"


class _Program(Step):
    __slots__ = ()
    _kind = "program"


class _Row(Step):
    __slots__ = ()
    _kind = "row"


# ---- temperature and its kin ----


@dataclass(frozen=True, slots=True)
class Temperature(_Program):
    """Divides logits by `value`; 0 is greedy."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _real(self, "value", 0, math.inf, most=False)


@dataclass(frozen=True, slots=True)
class DynamicTemperature(_Program):
    """A temperature between low and high: low + (high - low) * (entropy / its most) ** exponent, over what is left.

    llama.cpp's temp_ext(t, delta, exponent) is low = max(0, t - delta), high = t + delta.
    """

    low: float
    high: float
    exponent: float = 1.0

    def __post_init__(self) -> None:
        for name in ("low", "high", "exponent"):
            _real(self, name, 0, 1e30)
        if self.high < self.low:
            raise ValueError(f"DynamicTemperature: high must be at least low, got {self.high} and {self.low}")


@dataclass(frozen=True, slots=True)
class Smoothing(_Program):
    """The quadratic transform: with d = logit - max, max - k factor d**2 + s factor d**3, k and s from the curve.

    k = (3 - curve) / 2, s = (curve - 1) / 2 (text-generation-webui); factor 0 is off.
    """

    factor: float
    curve: float = 1.0

    def __post_init__(self) -> None:
        _real(self, "factor", 0, 1e30)
        _real(self, "curve", 1, 3)


# ---- truncations ----


@dataclass(frozen=True, slots=True)
class TopK(_Program):
    """Keeps the k largest; k <= 0 is off. ties="all" also keeps what equals the last of them."""

    k: int
    min_keep: int = 1
    ties: Ties = "lowest"

    def __post_init__(self) -> None:
        _whole(self, "k", -(2**31))
        _whole(self, "min_keep")
        _choice(self, "ties", ("lowest", "all"))


@dataclass(frozen=True, slots=True)
class TopP(_Program):
    """Keeps an id while the mass before it is less than p; p <= 0 keeps one, p >= 1 is off."""

    p: float
    min_keep: int = 1
    ties: Ties = "lowest"

    def __post_init__(self) -> None:
        _real(self, "p", -math.inf, math.inf)
        _whole(self, "min_keep")
        _choice(self, "ties", ("lowest", "all"))


@dataclass(frozen=True, slots=True)
class MinP(_Program):
    """Keeps what is at least p times as probable as the likeliest."""

    p: float
    min_keep: int = 1

    def __post_init__(self) -> None:
        _real(self, "p", 0, 1)
        _whole(self, "min_keep")


@dataclass(frozen=True, slots=True)
class Typical(_Program):
    """Locally typical sampling (Meister et al., arXiv 2202.00666): mass p of what surprises as the entropy says."""

    p: float
    min_keep: int = 1

    def __post_init__(self) -> None:
        _real(self, "p", 0, math.inf, least=False)
        _whole(self, "min_keep")


@dataclass(frozen=True, slots=True)
class Epsilon(_Program):
    """Keeps probabilities of at least `cutoff` (Hewitt et al., arXiv 2210.15191)."""

    cutoff: float
    min_keep: int = 1

    def __post_init__(self) -> None:
        _real(self, "cutoff", 0, 1, most=False)
        _whole(self, "min_keep")


@dataclass(frozen=True, slots=True)
class Eta(_Program):
    """Keeps probabilities of at least min(cutoff, sqrt(cutoff) exp(-entropy)) (Hewitt et al., arXiv 2210.15191)."""

    cutoff: float
    min_keep: int = 1

    def __post_init__(self) -> None:
        _real(self, "cutoff", 0, 1, most=False)
        _whole(self, "min_keep")


@dataclass(frozen=True, slots=True)
class TopH(_Program):
    """Keeps the likeliest while their entropy is within the share h of that of the 100 first (arXiv 2509.02510)."""

    h: float

    def __post_init__(self) -> None:
        _real(self, "h", 0, 1, least=False)


@dataclass(frozen=True, slots=True)
class TopA(_Program):
    """Keeps probabilities of at least a times the square of the largest."""

    a: float

    def __post_init__(self) -> None:
        _real(self, "a", 0, 1)


@dataclass(frozen=True, slots=True)
class TailFree(_Program):
    """Keeps the mass z of the bends (second differences) of the sorted probabilities; z >= 1 is off."""

    z: float
    min_keep: int = 1

    def __post_init__(self) -> None:
        _real(self, "z", 0, math.inf)
        _whole(self, "min_keep")


@dataclass(frozen=True, slots=True)
class TopNSigma(_Program):
    """Keeps logits within n standard deviations of the largest (Tang et al., arXiv 2411.07641); n <= 0 is off.

    ddof: 0 divides by how many are left, 1 by one fewer (text-generation-webui).
    """

    n: float
    ddof: int = 0

    def __post_init__(self) -> None:
        _real(self, "n", -math.inf, math.inf, most=False)
        _whole(self, "ddof", 0, 1)


@dataclass(frozen=True, slots=True)
class XTC(_Program):
    """With `probability`, removes all that reach `threshold` but the least likely of them; off above 0.5."""

    probability: float
    threshold: float = 0.1
    min_keep: int = 1

    def __post_init__(self) -> None:
        _real(self, "probability", 0, 1)
        _real(self, "threshold", 0, math.inf)
        _whole(self, "min_keep")


@dataclass(frozen=True, slots=True)
class Mirostat(_Program):
    """Mirostat 1 (Basu et al., arXiv 2007.14966): a top-k steered by surprise; m probabilities estimate its slope."""

    tau: float = 5.0
    eta: float = 0.1
    m: int = 100

    def __post_init__(self) -> None:
        _real(self, "tau", 0, 1e30)
        _real(self, "eta", 0, 1e30)
        _whole(self, "m", 2)


@dataclass(frozen=True, slots=True)
class MirostatV2(_Program):
    """Mirostat 2: keeps surprise up to mu, and moves mu by eta times what the token's was off tau."""

    tau: float = 5.0
    eta: float = 0.1

    def __post_init__(self) -> None:
        _real(self, "tau", 0, 1e30)
        _real(self, "eta", 0, 1e30)


@dataclass(frozen=True, slots=True)
class AdaptiveP(_Program):
    """Prefers probabilities near a target, which follows the average of those drawn; target < 0 is off."""

    target: float = 0.5
    decay: float = 0.9

    def __post_init__(self) -> None:
        _real(self, "target", -math.inf, 1)
        _real(self, "decay", 0, 0.99)


# ---- edits of single logits ----


@dataclass(frozen=True, slots=True)
class LogitBias(_Edit):
    """Adds to single logits: {id: value}; -inf forbids."""

    bias: Any

    def __post_init__(self) -> None:
        pairs = [(_one_id("LogitBias", "id", id_), value) for id_, value in _pairs("LogitBias", "bias", self.bias)]
        object.__setattr__(self, "bias", tuple((id_, _bias("LogitBias", str(id_), value)) for id_, value in pairs))


@dataclass(frozen=True, slots=True)
class SequenceBias(_Edit):
    """Adds to the last id of each sequence whose other ids are what the text ends with: {(id, ...): value}.

    over: "both" also looks at the prompt; vLLM's bad words look at the "output" alone.
    """

    bias: Any
    over: Over = "both"

    def __post_init__(self) -> None:
        found = []
        for ids, value in _pairs("SequenceBias", "bias", self.bias):
            sequence = _id_list("SequenceBias", "a sequence", ids)
            if not sequence:
                raise ValueError("SequenceBias: a sequence must have at least one id")
            found.append((sequence, _bias("SequenceBias", str(list(sequence)), value)))
        object.__setattr__(self, "bias", tuple(found))
        _choice(self, "over", _OVERS)


@dataclass(frozen=True, slots=True)
class BadWords(_Edit):
    """Forbids the last id of each sequence whose others are what the text ends with; one of eos_ids alone is none."""

    words: Any
    over: Over = "both"
    eos_ids: Any = ()

    def __post_init__(self) -> None:
        _ids(self, "eos_ids")
        if isinstance(self.words, (str, bytes)) or not isinstance(self.words, Iterable):
            raise TypeError(f"BadWords: words must be a list of lists of ids, got {self.words!r}")
        words = tuple(_id_list("BadWords", f"words[{i}]", word) for i, word in enumerate(self.words))
        for i, word in enumerate(words):
            if not word:
                raise ValueError(f"BadWords: words[{i}] must have at least one id")
        object.__setattr__(self, "words", words)
        _choice(self, "over", _OVERS)


@dataclass(frozen=True, slots=True)
class Suppress(_Edit):
    """Forbids ids."""

    ids: Any

    def __post_init__(self) -> None:
        _ids(self, "ids")


@dataclass(frozen=True, slots=True)
class SuppressAtBegin(_Edit):
    """Forbids ids where the text is `at` ids long: by default as the first of the output."""

    ids: Any
    at: int = 0
    over: Over = "output"

    def __post_init__(self) -> None:
        _ids(self, "ids")
        _whole(self, "at")
        _choice(self, "over", _OVERS)


@dataclass(frozen=True, slots=True)
class MinTokens(_Edit):
    """Forbids ids (the EOS and other stops) until the output, or with over="both" the text, has n ids."""

    n: int
    ids: Any
    over: Over = "output"

    def __post_init__(self) -> None:
        _whole(self, "n")
        _ids(self, "ids")
        _choice(self, "over", _OVERS)


@dataclass(frozen=True, slots=True)
class Penalties(_Edit):
    """Repetition divides positive logits and multiplies others; frequency (times its count) and presence subtract.

    Repetition looks at `over`, the others at `counts_over`; each at its last_n ids, or all. decay: behind these, so
    many more in which all three fade linearly, frequency for each occurrence at its own strength (exllamav2); then
    both look at `over`. repetition_last: it follows the others (mistral.rs). summed: frequency and presence are
    subtracted as one number (llama.cpp), not one after the other. away: they are subtracted from positive logits and
    *added* to others (OpenVINO).
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    last_n: int | None = None
    decay: int = 0
    over: Over = "both"
    counts_over: Over = "output"
    repetition_last: bool = False
    summed: bool = False
    away: bool = False

    def __post_init__(self) -> None:
        most = float(np.finfo(np.float32).max)
        _real(self, "repetition", float(np.finfo(np.float32).tiny), most)
        _real(self, "frequency", -most, most)
        _real(self, "presence", -most, most)
        _window(self)
        _whole(self, "decay")
        _choice(self, "over", _OVERS)
        _choice(self, "counts_over", _OVERS)
        for name in ("repetition_last", "summed", "away"):
            _flag(self, name)
        if self.decay and (self.repetition_last or self.summed or self.away):
            raise ValueError("Penalties: decay has no repetition_last, summed or away")


@dataclass(frozen=True, slots=True)
class EncoderRepetition(_Edit):
    """Makes the ids of the prompt, or of `ids`, likelier: a repetition penalty of 1 / penalty."""

    penalty: float
    ids: Any = None

    def __post_init__(self) -> None:
        _real(self, "penalty", float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max))
        if self.ids is not None:
            _ids(self, "ids")


@dataclass(frozen=True, slots=True)
class NoRepeatNgram(_Edit):
    """Forbids what would repeat n ids in a row; n = 1 forbids all that is there."""

    n: int
    over: Over = "both"

    def __post_init__(self) -> None:
        _whole(self, "n", 1)
        _choice(self, "over", _OVERS)


@dataclass(frozen=True, slots=True)
class EncoderNoRepeatNgram(_Edit):
    """Forbids what would repeat n ids in a row of the prompt, or of `ids`."""

    n: int
    ids: Any = None

    def __post_init__(self) -> None:
        _whole(self, "n", 1)
        if self.ids is not None:
            _ids(self, "ids")


@dataclass(frozen=True, slots=True)
class DRY(_Edit):
    """Lowers what would go on repeating L >= allowed_length ids, by multiplier * base ** (L - allowed_length).

    last_n: how far back repeats are looked for (None: all). breakers: ids, or sequences of ids, that repeats do not
    reach across; single ones are never lowered. max_match: L counts no further (text-generation-webui, mistral.rs: 50).
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int | None = None
    breakers: Any = ()
    max_match: int | None = None
    over: Over = "both"

    def __post_init__(self) -> None:
        most = float(np.finfo(np.float32).max)
        _real(self, "multiplier", 0, most)
        _real(self, "base", 1, most)
        _whole(self, "allowed_length", 1)
        _window(self)
        _window(self, "max_match")
        _choice(self, "over", _OVERS)
        if isinstance(self.breakers, (str, bytes)) or not isinstance(self.breakers, Iterable):
            raise TypeError(f"DRY: breakers must be ids or lists of ids, got {self.breakers!r}")
        found = tuple(_id_list("DRY", f"breakers[{i}]", one) for i, one in enumerate(self.breakers))
        if not all(found):
            raise ValueError("DRY: a breaker must have at least one id")
        object.__setattr__(self, "breakers", found)


@dataclass(frozen=True, slots=True)
class LengthDecay(_Edit):
    """Once more than `start` ids are put out, raises ids (the EOS) by |logit| * (factor ** how many more - 1)."""

    start: int
    factor: float
    ids: Any
    over: Over = "output"

    def __post_init__(self) -> None:
        _whole(self, "start")
        _real(self, "factor", 0, math.inf, least=False, most=False)
        _ids(self, "ids")
        _choice(self, "over", _OVERS)


@dataclass(frozen=True, slots=True)
class ForcedIds(_Edit):
    """Leaves nothing but one id, or some alike, where the text has a length: {length: id or ids}."""

    at: Any
    over: Over = "output"

    def __post_init__(self) -> None:
        found = []
        for length, ids in _pairs("ForcedIds", "at", self.at):
            forced = _id_list("ForcedIds", f"at[{length}]", ids)
            if not forced:
                raise ValueError(f"ForcedIds: at[{length}] must have at least one id")
            found.append((_one_id("ForcedIds", "a length", length), forced))
        object.__setattr__(self, "at", tuple(found))
        _choice(self, "over", _OVERS)


@dataclass(frozen=True, slots=True)
class ForcedBOS(_Edit):
    """Leaves nothing but `id` where the text, prompt included, is one id long."""

    id: int

    def __post_init__(self) -> None:
        _whole(self, "id")


@dataclass(frozen=True, slots=True)
class ForcedEOS(_Edit):
    """Leaves nothing but ids (the EOS) as the last of max_length ids: of prompt and output, or of the "output"."""

    max_length: int
    ids: Any
    over: Over = "both"

    def __post_init__(self) -> None:
        _whole(self, "max_length", 1)
        _ids(self, "ids")
        _choice(self, "over", _OVERS)
        if not self.ids:
            raise ValueError("ForcedEOS: ids must have at least one id")


# ---- the whole row ----

_DOMAIN_GREEN = 7  # of Philox's counters: no draw uses it


def _mixed(x: int) -> int:
    """64 bits from 64, one to one (Steele, Lea & Flood, SplitMix64)."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@dataclass(frozen=True, slots=True)
class Guidance(_Row):
    """Classifier-free guidance (arXiv 2306.17806): u + scale * (log_softmax(logits) - u), u that of the other row.

    The call of the Sampler is given that row, the unconditional one, as guides=.
    """

    scale: float

    def __post_init__(self) -> None:
        _real(self, "scale", -math.inf, math.inf, least=False, most=False)


@dataclass(frozen=True, slots=True)
class Contrastive(_Row):
    """Contrastive decoding: (1 + beta) * logits - beta * guides among what has alpha times the largest probability.

    guides: the row of a weaker model, given to the call. Li et al., arXiv 2210.15097; beta as O'Brien & Lewis,
    arXiv 2309.09117, have it.
    """

    alpha: float = 0.1
    beta: float = 0.5

    def __post_init__(self) -> None:
        _real(self, "alpha", 0, 1)
        _real(self, "beta", 0, math.inf, most=False)


@dataclass(frozen=True, slots=True)
class Infill(_Row):
    """llama.cpp's fill-in-the-middle: the end where it is likely, tokens that begin others merged, few kept.

    eog_ids: ids that end a text, the first of them what is taken if nothing else stays. pieces: the text of each id, to
    merge those that others begin with; without them none are merged.
    """

    eog_ids: Any
    pieces: Any = None

    def __post_init__(self) -> None:
        _ids(self, "eog_ids")
        if not self.eog_ids:
            raise ValueError("Infill: eog_ids must have at least one id")
        if self.pieces is not None:
            pieces = (
                () if isinstance(self.pieces, (str, bytes)) or not isinstance(self.pieces, Iterable) else self.pieces
            )
            found = tuple(one.encode() if isinstance(one, str) else one for one in pieces)
            if not found or not all(isinstance(one, (bytes, bytearray)) for one in found):
                raise TypeError(f"Infill: pieces must be a list of str or bytes, one an id, got {self.pieces!r:.80}")
            object.__setattr__(self, "pieces", tuple(bytes(one) for one in found))


@dataclass(frozen=True, slots=True)
class Watermark(_Row):
    """Adds `bias` to the green ids, about `share` of all, which follow from the last `context` ids and the key.

    Kirchenbauer et al., arXiv 2301.10226. Each id is green or not on its own, from Philox noise of (key, context, id):
    `green_ids` says which, to detect the mark. greens(ids) -> the green ids, if given, is asked instead
    (transformers draws them from torch's generator). Texts shorter than `context` are left alone.
    """

    share: float = 0.25
    bias: float = 2.0
    key: int = 15485863
    context: int = 1
    greens: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        _real(self, "share", 0, 1, least=False, most=False)
        _real(self, "bias", -math.inf, math.inf, least=False, most=False)
        _whole(self, "key", 0, 2**64 - 1)
        _whole(self, "context", 1)
        if self.greens is not None and not callable(self.greens):
            raise TypeError(f"Watermark: greens must be a function, got {self.greens!r}")

    def green_ids(self, ids: Any, vocab_size: int) -> Any:
        """The ids that are green after the text `ids`, int64, ascending unless `greens` says otherwise."""
        text = np.asarray(ids, np.int64)[-self.context :]
        if len(text) < self.context:
            raise ValueError(f"Watermark: the text must have at least {self.context} ids, got {len(text)}")
        if self.greens is not None:
            return np.asarray(self.greens(np.asarray(ids, np.int64)), np.int64)
        mixed = 0
        for id_ in text.tolist():
            mixed = _mixed(mixed ^ id_)
        bits = np.empty(vocab_size, np.uint64)
        _ops.run_noise("philox", bits, 0, _DOMAIN_GREEN, self.key, mixed, 0)
        return np.flatnonzero(bits < np.uint64(int(self.share * 2.0**64)))


@dataclass(frozen=True, slots=True)
class Renormalise(_Row):
    """Log-softmax of the row: a penalty behind it sees log-probabilities."""


@dataclass(frozen=True, slots=True)
class Custom(_Row):
    """A step of your own: function(ids, row) gives the row, float32; it may write to row. ids: prompt and output."""

    function: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Custom: function must be callable, got {self.function!r}")


# ---- the orders of projects ----


def _some(*steps: tuple[bool, Callable[[], Step]]) -> tuple[Step, ...]:
    """Those that do something."""
    return tuple(make() for does, make in steps if does)


_P = ParamSpec("_P")


def _checked(make: Callable[_P, tuple[Step, ...]]) -> Callable[_P, tuple[Step, ...]]:
    """With errors that name what is no number, before it is compared: a NaN would leave its step out."""
    defaults = {name: told.default for name, told in inspect.signature(make).parameters.items()}
    numbers = {name for name, default in defaults.items() if type(default) in (int, float)}

    @functools.wraps(make)
    def made(*args: _P.args, **told: _P.kwargs) -> tuple[Step, ...]:
        for name, value in told.items():
            if name not in numbers:
                continue
            try:
                number = float(value + 0.0)  # type: ignore[operator]  # float() alone would read a str
            except OverflowError:
                continue
            except (TypeError, ValueError):
                raise TypeError(f"{make.__name__}: {name} must be a number, got {value!r}") from None
            if math.isnan(number):
                raise ValueError(f"{make.__name__}: {name} must be a number, got {value}")
        return make(*args, **told)

    return made


@_checked
def transformers(
    *,
    guidance_scale: float | None = None,
    sequence_bias: Any = None,
    encoder_repetition_penalty: float = 1.0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    encoder_no_repeat_ngram_size: int = 0,
    bad_words_ids: Any = None,
    min_length: int = 0,
    min_new_tokens: int = 0,
    forced_bos_token_id: int | None = None,
    forced_eos_token_id: Any = None,
    max_length: int | None = None,
    exponential_decay_length_penalty: tuple[int, float] | None = None,
    suppress_tokens: Any = None,
    begin_suppress_tokens: Any = None,
    temperature: float = 1.0,
    top_h: float | None = None,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float | None = None,
    typical_p: float = 1.0,
    epsilon_cutoff: float = 0.0,
    eta_cutoff: float = 0.0,
    watermark: Watermark | None = None,
    eos_token_id: Any = (),
    min_keep: int = 1,
    user_steps: Iterable[Step] = (),
) -> tuple[Step, ...]:
    """The order of transformers' generate(do_sample=True), in the names of its GenerationConfig.

    >>> lanewise.steps.transformers(top_p=0.9)
    (Temperature(value=1.0), TopK(k=50, min_keep=1, ties='all'), TopP(p=0.9, min_keep=1, ties='lowest'))
    """
    eos = _id_list("transformers", "eos_token_id", eos_token_id)
    edits = _some(
        (guidance_scale not in (None, 1), lambda: Guidance(guidance_scale or 0.0)),
        (bool(sequence_bias), lambda: SequenceBias(sequence_bias)),
        (encoder_repetition_penalty != 1, lambda: EncoderRepetition(encoder_repetition_penalty)),
        (repetition_penalty != 1, lambda: Penalties(repetition_penalty)),
        (no_repeat_ngram_size > 0, lambda: NoRepeatNgram(no_repeat_ngram_size)),
        (encoder_no_repeat_ngram_size > 0, lambda: EncoderNoRepeatNgram(encoder_no_repeat_ngram_size)),
        (bad_words_ids is not None, lambda: BadWords(bad_words_ids, eos_ids=eos)),
        (min_length > 0 and bool(eos), lambda: MinTokens(min_length, eos, "both")),
        (min_new_tokens > 0 and bool(eos), lambda: MinTokens(min_new_tokens, eos)),
        (forced_bos_token_id is not None, lambda: ForcedBOS(forced_bos_token_id or 0)),
        (forced_eos_token_id is not None, lambda: ForcedEOS(max_length or 0, forced_eos_token_id)),
        (
            exponential_decay_length_penalty is not None,
            lambda: LengthDecay(*(exponential_decay_length_penalty or (0, 1.0)), eos),
        ),
        (suppress_tokens is not None, lambda: Suppress(suppress_tokens)),
        (begin_suppress_tokens is not None, lambda: SuppressAtBegin(begin_suppress_tokens)),
    )
    shape = _some(
        (True, lambda: Temperature(temperature)),
        (top_h is not None, lambda: TopH(top_h or 1.0)),
        (top_k > 0, lambda: TopK(top_k, min_keep, "all")),
        (top_p < 1, lambda: TopP(top_p, min_keep)),
        (bool(min_p), lambda: MinP(min_p or 0.0, min_keep)),
        (typical_p < 1, lambda: Typical(typical_p, min_keep)),
        (0 < epsilon_cutoff < 1, lambda: Epsilon(epsilon_cutoff, min_keep)),
        (0 < eta_cutoff < 1, lambda: Eta(eta_cutoff, min_keep)),
    )
    return edits + tuple(user_steps) + shape + (() if watermark is None else (watermark,))


@_checked
def vllm(
    *,
    bad_words_token_ids: Any = None,
    min_tokens: int = 0,
    stop_token_ids: Any = (),
    logit_bias: Any = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_keep: int = 1,
) -> tuple[Step, ...]:
    """The order of vLLM's V1 sampler, in the names of its SamplingParams; stop_token_ids with the EOS among them.

    >>> lanewise.steps.vllm(min_p=0.1, top_k=20)
    (Temperature(value=1.0), MinP(p=0.1, min_keep=1), TopK(k=20, min_keep=1, ties='all'))
    """
    penalised = (repetition_penalty, frequency_penalty, presence_penalty)
    return _some(
        (bool(bad_words_token_ids), lambda: BadWords(bad_words_token_ids, "output")),
        (min_tokens > 0, lambda: MinTokens(min_tokens, stop_token_ids)),
        (bool(logit_bias), lambda: LogitBias(logit_bias)),
        (penalised != (1, 0, 0), lambda: Penalties(*penalised)),
        (True, lambda: Temperature(temperature if temperature >= 1e-5 else 0.0)),
        (min_p > 0, lambda: MinP(min_p, min_keep)),
        (top_k > 0, lambda: TopK(top_k, min_keep, "all")),
        (top_p < 1, lambda: TopP(top_p, min_keep)),
    )


@_checked
def llama_cpp(
    *,
    logit_bias: Any = None,
    penalty_last_n: int = 64,
    penalty_repeat: float = 1.0,
    penalty_freq: float = 0.0,
    penalty_present: float = 0.0,
    dry_multiplier: float = 0.0,
    dry_base: float = 1.75,
    dry_allowed_length: int = 2,
    dry_penalty_last_n: int = 64,
    dry_breakers: Any = (),
    top_n_sigma: float = -1.0,
    top_k: int = 40,
    typ_p: float = 1.0,
    top_p: float = 0.95,
    min_p: float = 0.05,
    min_keep: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    temp: float = 0.8,
    dynatemp_range: float = 0.0,
    dynatemp_exponent: float = 1.0,
    mirostat: int = 0,
    mirostat_tau: float = 5.0,
    mirostat_eta: float = 0.1,
    adaptive_target: float = -1.0,
    adaptive_decay: float = 0.9,
) -> tuple[Step, ...]:
    """llama.cpp's default chain, in the names of its common_params_sampling; dry_breakers are ids, not texts.

    A penalty_last_n or dry_penalty_last_n of -1 looks at the whole text. mirostat 1 or 2 takes the truncations' place.

    >>> lanewise.steps.llama_cpp(min_p=0, temp=0.7)
    (TopK(k=40, min_keep=0, ties='lowest'), TopP(p=0.95, min_keep=0, ties='lowest'), Temperature(value=0.7))
    """
    if mirostat not in (0, 1, 2):
        raise ValueError(f"mirostat must be 0, 1 or 2, got {mirostat!r}")
    penalised, window = (penalty_repeat, penalty_freq, penalty_present), _last_n("penalty_last_n", penalty_last_n)
    dry_window = _last_n("dry_penalty_last_n", dry_penalty_last_n)
    edits = _some(
        (bool(logit_bias), lambda: LogitBias(logit_bias)),
        (
            window != 0 and penalised != (1, 0, 0),
            lambda: Penalties(*penalised, last_n=window, counts_over="both", summed=True),
        ),
        (
            dry_multiplier != 0 and dry_base >= 1 and dry_window != 0,
            lambda: DRY(dry_multiplier, dry_base, dry_allowed_length, dry_window, dry_breakers),
        ),
    )
    if mirostat:
        how = (mirostat_tau, mirostat_eta)
        return (*edits, Temperature(temp), Mirostat(*how) if mirostat == 1 else MirostatV2(*how))
    dynamic = dynatemp_range > 0 and temp > 0
    low, high = max(0.0, temp - dynatemp_range), temp + dynatemp_range
    return edits + _some(
        (top_n_sigma > 0, lambda: TopNSigma(top_n_sigma)),
        (top_k > 0, lambda: TopK(top_k, min_keep)),
        (typ_p < 1, lambda: Typical(typ_p, min_keep)),
        (top_p < 1, lambda: TopP(top_p, min_keep)),
        (min_p > 0, lambda: MinP(min_p, min_keep)),
        (xtc_probability > 0 and xtc_threshold <= 0.5, lambda: XTC(xtc_probability, xtc_threshold, min_keep)),
        (dynamic, lambda: DynamicTemperature(low, high, dynatemp_exponent)),
        (not dynamic, lambda: Temperature(max(0.0, temp))),
        (adaptive_target >= 0, lambda: AdaptiveP(adaptive_target, min(max(adaptive_decay, 0.0), 0.99))),
    )


@_checked
def mlx_lm(
    *,
    logit_bias: Any = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    top_k: int = 0,
    temp: float = 0.0,
) -> tuple[Step, ...]:
    """The order of mlx-lm's make_logits_processors and make_sampler, in their names; temp is applied last.

    >>> lanewise.steps.mlx_lm(temp=0.6, top_p=0.9)
    (TopP(p=0.9, min_keep=1, ties='lowest'), Temperature(value=0.6))
    """

    def penalties(last_n: int, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> Step:
        return Penalties(repetition, frequency, presence, last_n=last_n, counts_over="both")

    return _some(
        (bool(logit_bias), lambda: LogitBias(logit_bias)),
        (bool(repetition_penalty), lambda: penalties(repetition_context_size, repetition_penalty or 1.0)),
        (bool(presence_penalty), lambda: penalties(presence_context_size, presence=presence_penalty or 0.0)),
        (bool(frequency_penalty), lambda: penalties(frequency_context_size, frequency=frequency_penalty or 0.0)),
        (0 < top_p < 1, lambda: TopP(top_p)),
        (min_p > 0, lambda: MinP(min_p, min_tokens_to_keep)),
        (xtc_probability > 0, lambda: XTC(xtc_probability, xtc_threshold)),
        (top_k > 0, lambda: TopK(top_k)),
        (True, lambda: Temperature(temp)),
    )


def _last_n(name: str, value: int) -> int | None:
    if operator.index(value) < -1:
        raise ValueError(f"{name} must be at least -1, got {value}")
    return None if value == -1 else value


PRESETS: dict[str, Callable[..., tuple[Step, ...]]] = {
    "transformers": transformers,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
    "mlx-lm": mlx_lm,
}
_NAMES = {  # of SamplingParams' fields, where a project has another
    "llama.cpp": {
        "temperature": "temp",
        "repetition_penalty": "penalty_repeat",
        "frequency_penalty": "penalty_freq",
        "presence_penalty": "penalty_present",
    },
    "mlx-lm": {"temperature": "temp", "min_keep": "min_tokens_to_keep"},
}


def preset(name: str, params: SamplingParams | None = None, **numbers: Any) -> tuple[Step, ...]:
    """The steps of a project, in its order: "transformers", "vllm", "llama.cpp" or "mlx-lm".

    numbers: in the project's own names, its defaults where none is given. params: all numbers of a SamplingParams,
    which leaves none of its own to the project's defaults. Steps that would do nothing are left out.
    Raises ValueError, TypeError.

    >>> lanewise.steps.preset("vllm", lanewise.SamplingParams(temperature=0.7, top_p=0.9))
    (Temperature(value=0.7), TopP(p=0.9, min_keep=1, ties='lowest'))
    """
    make = PRESETS.get(name) if isinstance(name, str) else None
    if make is None:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be a SamplingParams, got {params!r}")
        names = _NAMES.get(name, {})
        told = {names.get(field, field): getattr(params, field) for field in SamplingParams.__slots__}
        if name == "transformers":
            counts = told.pop("frequency_penalty"), told.pop("presence_penalty")
            if counts != (0, 0):  # transformers has none: behind the repetition, as sample has them
                extra = Penalties(1.0, *counts)
                numbers["user_steps"] = (extra, *numbers.get("user_steps", ()))
        both = set(told) & set(numbers)
        if both:
            raise ValueError(f"{sorted(both)[0]} is given in params and as a keyword")
        numbers = told | numbers
    return make(**numbers)

"""Every operation in plain NumPy: the specification, and the oracle the kernels are tested against.

What decides (arithmetic, noise, truncation, the draw) is here to the last bit, so tests compare with ==. Values
(softmax and its kin) are float64, and the kernels agree with them within a stated error. Nothing here is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._program import CODES, STEPS

if TYPE_CHECKING:
    from .chain import Program

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]

WEIGHT_ONE = 2.0**43
LN2 = 6.93147180559945286227e-01


# ---- arithmetic ----


def fma32(a: Any, b: Any, c: Any) -> F32:
    """a * b + c rounded once to float32: the exact product and sum in float64, rounded to odd, then to float32."""
    p = np.float64(a) * np.float64(b)
    d = np.float64(c)
    s = p + d
    t = s - p
    error = (p - (s - t)) + (d - t)
    bits = s.view(np.int64)
    moved = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    away = np.where((error > 0) == (s > 0), 1, -1)  # from zero, where magnitudes have the larger bits
    odd: F64 = (bits + moved * away).view(np.float64)
    return odd.astype(np.float32)


def exp32(x: Any) -> F32:
    """The package's exp: float32, monotone, 0 below -87.33 and for NaN."""
    x = np.float32(x)
    with np.errstate(all="ignore"):
        magic = np.float32(1.5 * 2**23)
        t = fma32(x, np.float32(1.44269504088896341), magic)
        n = t - magic
        r = fma32(n, np.float32(-1.42860682030941723212e-6), fma32(n, np.float32(-0.693145751953125), x))
        p: Any = np.float32(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = fma32(p, r, np.float32(c))
        p = fma32(r * r, p, r) + np.float32(1)
        scaled = (p.view(np.uint32) + (t.view(np.uint32) << np.uint32(23))).view(np.float32)
        return np.where(x >= np.float32(-87.33), scaled, np.float32(0))


def exp_rough(x: Any) -> F32:
    """What bounds are made of: within 3.1 % of exp32 on [-87, 0], and what it is at -87 below."""
    x = np.maximum(np.float32(x), np.float32(-87))
    one = np.float32(2.0**23 + 127 * 2**15 - 1409)
    t = fma32(x, np.float32(1.44269504088896341) * np.float32(2**15), one)
    return (t.view(np.uint32) << np.uint32(8)).view(np.float32)


def weights(e: Any) -> U64:
    """round(2^43 * e), half to even, as integers."""
    return np.asarray(np.rint(np.float64(e) * WEIGHT_ONE), np.uint64)


def _log_parts(k: Any, f: Any) -> F64:
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    half_square = 0.5 * f * f
    odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    even = z * (
        6.666666666666735130e-01
        + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860510658591e-01))
    )
    log1p_f = f - (half_square - s * (half_square + (even + odd)))
    return np.asarray((log1p_f + k * 1.90821492927058770002e-10) + k * 6.93147180369123816490e-01)


def _exponent_and_fraction(x: F64) -> tuple[F64, F64]:
    sqrt_half, one = np.uint64(0x3FE6A09E667F3BCD), np.uint64(0x3FF0000000000000)
    u = x.view(np.uint64) + (one - sqrt_half)
    m = ((u & np.uint64(0x000FFFFFFFFFFFFF)) + sqrt_half).view(np.float64)
    return (u >> np.uint64(52)).astype(np.float64) - 1023.0, m - 1.0


def log64(x: Any) -> F64:
    """The package's log: float64, monotone, for positive normal numbers."""
    return _log_parts(*_exponent_and_fraction(np.atleast_1d(np.float64(x)))).reshape(np.shape(x))


def exponential(bits: U64) -> F64:
    """Standard exponentials from 64 random bits each."""
    v = np.minimum((bits | np.uint64(1)).astype(np.float64) * 2.0**-64, 1 - 2.0**-53)
    k, f = _exponent_and_fraction(1.0 - v)
    direct = v < 0.25
    return -_log_parts(np.where(direct, 0.0, k), np.where(direct, -v, f))


# ---- noise ----


def philox(domain: int, items: Any, seed: int, key: int, step: int) -> U64:
    """64 random bits for each item of a domain: Philox4x32-10, two items a counter."""
    items = np.asarray(items, np.uint64)
    low = np.uint64(0xFFFFFFFF)
    c = [
        np.uint64(domain << 24) + (items >> np.uint64(1)),
        *(np.full_like(items, v) for v in (step, key & 0xFFFFFFFF, key >> 32)),
    ]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    even = items & np.uint64(1) == 0
    return np.asarray(np.where(even, c[0] | c[1] << np.uint64(32), c[2] | c[3] << np.uint64(32)))


DOMAIN_ROOT, DOMAIN_BLOCK, DOMAIN_ID, DOMAIN_BLOCK_POSITION = range(4)


def gumbel(n: int, seed: int, key: int, step: int) -> F64:
    """The noise of ids 0..n-1."""
    return _superblocks(-(-n // 4096), seed, key, step)[:n]


@lru_cache(maxsize=64)
def _superblocks(count: int, seed: int, key: int, step: int) -> F64:
    """64 ids a block, 64 blocks a superblock, drawn from the maxima down."""
    draw = seed, key, step
    at = np.arange(count)
    root = exponential(philox(DOMAIN_ROOT, 2 * at, *draw)) / 4096
    blocks = np.repeat(root, 64) + exponential(philox(DOMAIN_BLOCK, np.arange(count * 64), *draw)) / 64
    largest = (philox(DOMAIN_ROOT, 2 * at + 1, *draw) >> np.uint64(58)).astype(int)
    blocks[at * 64 + largest] = root
    ids = np.repeat(blocks, 64) + exponential(philox(DOMAIN_ID, np.arange(count * 4096), *draw))
    at = np.arange(count * 64)
    largest = (philox(DOMAIN_BLOCK_POSITION, at, *draw) >> np.uint64(58)).astype(int)
    ids[at * 64 + largest] = blocks
    noise = -log64(ids)
    noise.flags.writeable = False  # every later call gets the same array
    return noise


# ---- values ----


def _rows(logits: Any, temperature: Any) -> tuple[F64, F64]:
    """(x - max) / T in float64, and max / T."""
    x = np.asarray(logits, np.float64)
    t = np.minimum(np.broadcast_to(np.float64(temperature), x.shape[:-1]), 1e30)[..., None]
    with np.errstate(all="ignore"):
        top = x.max(-1, keepdims=True)
        return (x - top) / t, top / t


def softmax(logits: Any, temperature: Any = 1.0) -> F64:
    y, _ = _rows(logits, temperature)
    e = np.exp(y)
    return np.asarray(e / e.sum(-1, keepdims=True))


def log_softmax(logits: Any, temperature: Any = 1.0) -> F64:
    y, _ = _rows(logits, temperature)
    return np.asarray(y - np.log(np.exp(y).sum(-1, keepdims=True)))


def logsumexp(logits: Any, temperature: Any = 1.0) -> F64:
    y, top = _rows(logits, temperature)
    with np.errstate(all="ignore"):
        total = top[..., 0] + np.log(np.exp(y).sum(-1))
    return np.asarray(np.where(np.isinf(top[..., 0]), top[..., 0], total))


def scale(logits: Any, temperature: Any) -> F32:
    t = np.minimum(np.broadcast_to(np.float64(temperature), np.shape(logits)[:-1]), 1e30).astype(np.float32)
    with np.errstate(all="ignore"):
        y = np.asarray(logits, np.float32) / t[..., None]
    return np.where(np.isnan(y), np.float32(np.nan), y)


# ---- order ----


def descending(z: F32) -> NDArray[np.intp]:
    """The ids in the order of every truncation: descending logit, ties by ascending id."""
    return np.argsort(-(z + np.float32(0)), kind="stable")


def argmax(row: F32) -> int:
    """The first of the largest; -1 for a row with a NaN or +inf, or all -inf."""
    return int(row.argmax()) if -np.inf < row.max() < np.inf else -1


def top_k(row: F32, k: int) -> tuple[F32, NDArray[np.intp]]:
    ids = descending(row)[:k]
    return row[ids], ids


# ---- sample ----

PRESETS = {
    "transformers": ("temperature", "top_k", "top_p", "min_p"),
    "vllm": ("temperature", "min_p", "top_k", "top_p"),
    "llama.cpp": ("top_k", "top_p", "min_p", "temperature"),
    "mlx-lm": ("top_p", "min_p", "top_k", "temperature"),
}


def apply_bias(row: F32, bias: Any) -> F32:
    """The row plus a bias, {id: value} or dense; as in all edits, what is not named keeps its bits."""
    if not isinstance(bias, dict):
        bias = dict(enumerate(np.asarray(bias, np.float32)))
    ids, values = list(bias), np.array(list(bias.values()), np.float32)
    z = np.array(row, np.float32)
    with np.errstate(all="ignore"):
        z[ids] = _one_nan(z[ids] + values)
    return z


def apply_penalties(
    row: F32,
    *,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> F32:
    """Each distinct id once: repetition over prompt and output, then frequency and presence over output."""
    z = np.array(row, np.float32)
    repetition, frequency, presence = map(np.float32, (repetition_penalty, frequency_penalty, presence_penalty))
    with np.errstate(all="ignore"):
        for i in dict.fromkeys([*output_ids, *prompt_ids]):
            z[i] = z[i] / repetition if z[i] > 0 else z[i] * repetition
            if count := list(output_ids).count(i):
                z[i] = z[i] - frequency * np.float32(count)
                z[i] = z[i] - presence
            z[i] = _one_nan(z[i])
    return z


def apply_token_bitmask(row: F32, mask: NDArray[np.bool_]) -> F32:
    """-inf where the mask, True = allowed, is False or ends."""
    allowed = np.zeros(len(row), bool)
    allowed[: len(mask)] = mask[: len(row)]
    return np.where(allowed, np.asarray(row, np.float32), np.float32(-np.inf))


def _one_nan(x: Any) -> Any:
    return np.where(np.isnan(x), np.float32(np.nan), x)


def processed(
    row: F32, *, bias: dict[int, float] | None = None, mask: NDArray[np.bool_] | None = None, **penalties: Any
) -> F32:
    """The row as it is judged: bias, penalties, then the mask, in float32."""
    z = apply_penalties(apply_bias(row + np.float32(0), bias or {}), **penalties)  # both zeros are one
    return z if mask is None else apply_token_bitmask(z, mask)


def _y(z: F32, top: np.float32, inverse: np.float32) -> F32:
    with np.errstate(all="ignore"):
        return (z - top) * inverse


def _with_ties(z: F32, order: NDArray[np.intp], kept: int, ties: bool) -> int:
    if ties:
        while kept < len(order) and z[order[kept]] == z[order[kept - 1]]:
            kept += 1
    return kept


def _reaching(w: U64, top_p: float) -> int:
    """How many of these weights are needed until those before the next reach the share top_p of them all."""
    limit = math.ceil(Fraction(top_p) * int(w.sum())) if top_p > 0 else 1
    return int(np.searchsorted(np.cumsum(w) - w, np.uint64(limit)))


def _round_down(x: float) -> np.float32:
    with np.errstate(over="ignore"):
        f = np.float32(x)
    return np.nextafter(f, np.float32(-np.inf)) if float(f) > x else f


def support(
    z: F32,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_keep: int = 1,
    ties: str = "lowest",
    steps: Iterable[str] = PRESETS["transformers"],
) -> NDArray[np.intp]:
    """The ids a draw is made from, ascending, for a valid row z."""
    top = z.max()
    order = descending(z)
    order = order[z[order] > -np.inf]
    if temperature < 1e-30:
        return order[:1]
    inverse, current = np.float32(1), 1.0
    for step in steps:
        kept = len(order)
        if step == "temperature":
            current = min(temperature, 1e30)
            inverse = np.float32(1.0 / current)
        elif step == "top_k" and top_k > 0 and max(top_k, min_keep) < len(z):
            kept = _with_ties(z, order, min(len(order), max(top_k, min_keep)), ties != "lowest")
        elif step == "top_p" and top_p < 1:
            kept = _reaching(weights(exp32(_y(z[order], top, inverse))), top_p)
            kept = max(_with_ties(z, order, kept, ties == "all"), min(min_keep, len(order)))
        elif step == "min_p" and min_p > 0:
            least = _round_down(float(top) + current * float(log64(max(min_p, 2.2250738585072014e-308))))
            kept = max(int((z[order] >= least).sum()), min(min_keep, len(order)))
        order = order[:kept]
    return np.sort(order)


def scores(
    z: F32, ids: NDArray[np.intp], temperature: float, *, seed: int, key: int, step: int, probs: bool = False
) -> tuple[F64, F64]:
    """What the highest of wins: z / T + noise, or log z + noise, exactly, as hi + lo; at temperature 0, z."""
    a = z[ids].astype(np.float64)
    if not probs and temperature < 1e-30:
        return a, np.zeros(len(ids))
    a = log64(a) if probs else a / min(temperature, 1e30)
    b = gumbel(len(z), seed, key, step)[ids]
    hi = a + b
    t = hi - a
    return hi, (a - (hi - t)) + (b - t)


def _best(hi: F64, lo: F64) -> int:
    """Where hi + lo is largest, and first."""
    largest = np.flatnonzero(hi == hi.max())
    return int(largest[lo[largest].argmax()])


def draw(
    z: F32,
    kept: NDArray[np.intp],
    temperature: float,
    *,
    seed: int = 0,
    key: int = 0,
    step: int = 0,
    u: float | None = None,
) -> int:
    """The token: argmax of z / T + Gumbel noise over `kept`, or the inverse CDF at u, in id order on the weights."""
    if len(kept) == 1:
        return int(kept[0])
    temperature = min(temperature, 1e30)
    if u is not None:
        w = [int(v) for v in weights(exp32(_y(z[kept], z.max(), np.float32(1.0 / temperature))))]
        target, running = math.floor(Fraction(u) * sum(w)), 0
        for i, weight in zip(kept, w, strict=True):
            running += weight
            if running > target:
                return int(i)
    return int(kept[_best(*scores(z, kept, temperature, seed=seed, key=key, step=step))])


def logprobs(z: F32, kept: NDArray[np.intp], temperature: float) -> F32:
    """Natural logprobs of `kept`, renormalised over it."""
    if temperature < 1e-30:
        return np.zeros(1, np.float32)
    y = _y(z[kept], z.max(), np.float32(1.0 / min(temperature, 1e30)))
    total = float(log64(float(int(weights(exp32(y)).sum())))) - 43 * LN2
    return (y.astype(np.float64) - total).astype(np.float32)


def sample(
    row: F32,
    *,
    seed: int = 0,
    key: int = 0,
    step: int = 0,
    u: float | None = None,
    preset: str = "transformers",
    ties: str = "lowest",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_keep: int = 1,
    **edits: Any,
) -> tuple[int, NDArray[np.intp], F32]:
    """(token, kept ids, their logprobs) of one row; (-1, none, none) if the row is invalid."""
    z = processed(row, **edits)
    if argmax(z) < 0:
        return -1, np.empty(0, np.intp), np.empty(0, np.float32)
    kept = support(
        z,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        min_keep=min_keep,
        ties=ties,
        steps=PRESETS[preset],
    )
    token = draw(z, kept, temperature, seed=seed, key=key, step=step, u=u)
    return token, kept, logprobs(z, kept, temperature)


# ---- chain ----

DOMAIN_XTC = 6
LARGEST = np.finfo(np.float32).max


def _log(x: float) -> float:
    return float(log64(x))


def _exp(x: float) -> float:
    return float(exp64(min(x, 700.0)))


class _Candidates:
    """What is left of a row: ids in descending order of their values, ties ascending, at the temperature reached."""

    def __init__(self, z: F32) -> None:
        order = descending(z)
        self.ids = order[z[order] > -np.inf]
        self.values = z[self.ids] + np.float32(0)
        self.temperature = 1.0
        self.vocab = len(z)

    @property
    def y(self) -> F32:
        """Values beside the largest of them, over the temperature."""
        return _y(self.values, self.values[0], np.float32(1.0 / self.temperature))

    @property
    def weights(self) -> U64:
        return weights(exp32(self.y))

    def log_total(self, w: U64) -> float:
        return _log(float(int(w.sum()))) - 43 * LN2

    def mean(self) -> float:
        """Of -y, by weight: a quotient of exact sums."""
        y = self.y
        e = exp32(y)
        terms = e * np.minimum(-y, np.float32(88))
        return float(int(weights(terms).sum())) / float(int(weights(e).sum()))

    def entropy(self) -> float:
        return self.log_total(self.weights) + self.mean()

    def keep(self, which: Any) -> None:
        self.ids, self.values = self.ids[which], self.values[which]

    def keep_first(self, count: int, min_keep: float = 0) -> None:
        self.keep(slice(max(count, int(min_keep), 1)))

    def become(self, values: F32) -> None:
        """Other values for the logits: the order is theirs, and the temperature has been seen to."""
        order = np.lexsort((self.ids, -values))
        self.ids, self.values, self.temperature = self.ids[order], values[order] + np.float32(0), 1.0

    def cool(self, temperature: float) -> None:
        self.temperature = min(self.temperature * min(temperature, 1e30), 1e30)
        if temperature < 1e-30 or self.temperature < 1e-30:
            self.keep_first(1)
            self.temperature = 1.0


def _limit(share: float, total: int) -> int:
    return max(math.ceil(Fraction(share) * total), 1)


def _dynamic_temperature(c: _Candidates, temperature: float, delta: float, exponent: float) -> None:
    if delta > 0 and len(c.ids) > 1:
        low, high = max(temperature - delta, 0.0), temperature + delta
        share = min(max(c.entropy() / _log(float(len(c.ids))), 0.0), 1.0)
        power = 1.0 if exponent == 0 else 0.0 if share < 2.2250738585072014e-308 else _exp(exponent * _log(share))
        temperature = low + (high - low) * power
    if delta <= 0 or len(c.ids) > 1:
        c.cool(temperature)


def _quadratic(c: _Candidates, factor: float, curve: float) -> None:
    if factor > 0:
        f, k, s = np.float32(factor), np.float32((3.0 - curve) / 2.0), np.float32((curve - 1.0) / 2.0)
        with np.errstate(all="ignore"):
            a = np.minimum(-c.y, LARGEST)
            c.become(np.maximum(np.float32(0) - f * a * a * (s * a + k), -LARGEST))


def _top_k(c: _Candidates, k: float, ties: float) -> None:
    if k > 0:
        order = np.arange(len(c.ids))
        c.keep_first(_with_ties(c.values, order, min(int(k), len(order)), bool(ties)))


def _top_p(c: _Candidates, p: float, min_keep: float, ties: float) -> None:
    if p < 1:
        c.keep_first(_with_ties(c.values, np.arange(len(c.ids)), _reaching(c.weights, p), bool(ties)), min_keep)


def _min_p(c: _Candidates, p: float, min_keep: float) -> None:
    if p > 0:
        least = _round_down(float(c.values[0]) + c.temperature * _log(max(p, 2.2250738585072014e-308)))
        c.keep_first(int((c.values >= least).sum()), min_keep)


def _typical(c: _Candidates, p: float, min_keep: float) -> None:
    """The nearest to the mean of y first: |-log p - entropy| is |y - mean|."""
    if p < 1:
        distance = np.abs(c.y.astype(np.float64) + c.mean())
        nearest = np.argsort(distance, kind="stable")
        c.keep(np.sort(nearest[: max(_reaching(c.weights[nearest], p), int(min_keep), 1)]))


def _by_weight(c: _Candidates, share: float, min_keep: float) -> None:
    """p >= share."""
    w = c.weights
    c.keep_first(int((w >= np.uint64(_limit(share, int(w.sum())))).sum()), min_keep)


def _epsilon(c: _Candidates, epsilon: float, min_keep: float) -> None:
    if epsilon > 0:
        _by_weight(c, min(epsilon, 1.0), min_keep)


def _eta(c: _Candidates, epsilon: float, min_keep: float) -> None:
    if epsilon > 0:
        _by_weight(c, min(epsilon, math.sqrt(epsilon) * _exp(-c.entropy())), min_keep)


def _top_h(c: _Candidates, h: float) -> None:
    """Over the 100 first, whose entropy is summed in order: those up to its share h."""
    first = slice(min(len(c.ids), 100))
    w, y = c.weights[first], c.y[first]
    log_total, total = c.log_total(w), float(int(w.sum()))
    running: list[float] = []
    for weight, z in zip(w.tolist(), y.tolist(), strict=True):
        term = float(weight) / total * (log_total - z) if weight else 0.0
        running.append((running[-1] if running else 0.0) + term)
    kept = [sum_ <= running[-1] * h for sum_ in running]
    c.keep_first(kept.index(False) if False in kept else len(kept))


def _top_a(c: _Candidates, a: float) -> None:
    """p >= a * (largest p)^2; the largest weighs 2^43."""
    if a > 0:
        share = a * (WEIGHT_ONE / float(int(c.weights.sum())))
        c.keep_first(int((c.weights >= np.uint64(_limit(share, 2**43))).sum()))


def _tail_free(c: _Candidates, z: float, min_keep: float) -> None:
    """By the absolute second differences of what is in order."""
    n = len(c.ids)
    if z >= 1 or n <= 2:
        return
    bends = np.abs(np.diff(c.weights.astype(np.int64), 2))
    if not bends.any():
        bends[:] = 1
    running = np.cumsum(bends)
    over = np.flatnonzero(running > math.floor(Fraction(z) * int(running[-1])))
    over = over[over >= max(int(min_keep), 1)]
    c.keep_first(int(over[0]) if len(over) else n)


def _top_n_sigma(c: _Candidates, n: float, ddof: float) -> None:
    """z >= max - n * sigma, sigma over what is left: sums of z - max in sixteen lanes by id, in float64."""
    if n <= 0 or len(c.ids) <= 1:
        return
    d = np.zeros(-(-c.vocab // 16) * 16)
    d[c.ids] = c.values.astype(np.float64) - float(c.values[0])

    def total(terms: F64) -> float:
        lanes = np.cumsum(terms.reshape(-1, 16), axis=0)[-1]
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        return float(lanes[0])

    count = float(len(c.ids))
    mean = total(d) / count
    with np.errstate(all="ignore"):
        variance = (total(d * d) - mean * mean * count) / (count - ddof)
        bound = float(c.values[0]) - n * math.sqrt(max(variance, 0.0))
    c.keep_first(int((c.values >= _round_down(bound)).sum()))


def _mirostat_count(c: _Candidates, mu: float, m: float) -> int:
    """Basu et al., arXiv 2007.14966: how many, if what is left follows Zipf's law as its m first do."""
    if len(c.ids) == 1:
        return 1
    y = np.maximum(c.y[: int(m)], -LARGEST).astype(np.float64)
    products = squares = 0.0
    for i in range(len(y) - 1):
        t = _log((i + 2.0) / (i + 1.0))
        products += t * float(y[i] - y[i + 1])
        squares += t * t
    s = products / squares if squares > 0 else 0.0
    log_v = _log(float(c.vocab))
    above = s - 1.0
    power = _exp(max(mu * LN2, -700.0))
    with np.errstate(all="ignore"):
        below = 1.0 - _exp(-above * log_v)
        x = power / log_v if above == 0 or below == 0 else above * power / below
    x = min(max(x, 2.2250738585072014e-308), 1.7976931348623157e308)
    k = _exp(_log(x) / s) if s > 0 else (1e300 if x > 1 else 0.0)
    return len(c.ids) if k >= len(c.ids) else max(int(k), 1)


_STEPS: dict[str, Callable[..., None]] = {
    "temperature": _Candidates.cool,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "dynamic_temperature": _dynamic_temperature,
    "quadratic": _quadratic,
    "typical": _typical,
    "epsilon": _epsilon,
    "eta": _eta,
    "top_h": _top_h,
    "top_a": _top_a,
    "tail_free": _tail_free,
    "top_n_sigma": _top_n_sigma,
    "renormalise": lambda c: None,
}


def chain(
    row: F32,
    program: Program,
    *,
    state: Sequence[float] | None = None,
    seed: int = 0,
    key: int = 0,
    step: int = 0,
    added: Sequence[tuple[int, float]] = (),
    mask: NDArray[np.bool_] | None = None,
    **edits: Any,
) -> tuple[int, NDArray[np.intp], F32, tuple[float, float]]:
    """(token, kept ids, their logprobs, state) of one row: edits, the steps of a program in its order, a draw."""
    first, second = program.state.tolist() if state is None else map(float, state)
    z = processed(row, **edits)
    with np.errstate(all="ignore"):
        for i, value in added:
            z[i] = z[i] + np.float32(value)
    z = z if mask is None else apply_token_bitmask(z, mask)
    if argmax(z) < 0:
        return -1, np.empty(0, np.intp), np.empty(0, np.float32), (first, second)
    c, coins, rate, tau, decay = _Candidates(z), 0, 0.0, 0.0, 1.0
    surprises, probs = np.empty(0), np.empty(0, np.float32)
    for code in program.codes.tolist():
        name, numbers = _NAMES[int(code[0])], code[1 : 1 + _NUMBERS[int(code[0])]]
        if name == "xtc":
            u = float(philox(DOMAIN_XTC, [coins], seed, key, step)[0] >> np.uint64(12)) / 2**52
            coins += 1
            _xtc(c, u, *numbers)
        elif name in ("mirostat", "mirostat_v2"):
            tau, rate = numbers[:2]
            if name == "mirostat":
                c.keep_first(_mirostat_count(c, first, numbers[2]))
            elif first <= 0:
                c.keep_first(1)
            else:
                _by_weight(c, min(_exp(-first * LN2), 1.0), 1)
            surprises = (c.log_total(c.weights) - np.maximum(c.y, -LARGEST).astype(np.float64)) / LN2
        elif name == "adaptive_p" and numbers[0] >= 0:
            target, decay = numbers[0], min(numbers[1], 0.99)
            probs = exp32(c.y) * np.float32(WEIGHT_ONE / float(int(c.weights.sum())))
            aim = np.float32(target if second == 0 else min(max(2.0 * target - first / second, 0.0), 1.0))
            d = np.abs(probs - aim) * np.float32(1 / 0.3)
            values = np.float32(5) - np.float32(10) * d * d / (np.float32(1) + d)
            probs = probs[np.lexsort((c.ids, -values))]
            c.become(values)
        elif name != "adaptive_p":
            _STEPS[name](c, *numbers)
    hi, lo = _noisy_values(c, seed=seed, key=key, step=step)
    best = int(np.lexsort((c.ids, -lo, -hi))[0]) if len(c.ids) > 1 else 0
    if len(surprises):
        first -= rate * (float(surprises[best]) - tau)
    if len(probs):
        first, second = float(probs[best]) + decay * first, 1.0 + decay * second
    by_id = np.argsort(c.ids, kind="stable")  # not the AVX2 one, which qemu emulates wrongly
    logp = (c.y.astype(np.float64) - c.log_total(c.weights)).astype(np.float32)
    return int(c.ids[best]), c.ids[by_id], logp[by_id], (first, second)


_NAMES = {code: name for name, code in CODES.items()}
_NUMBERS = {code: len(STEPS[name]) for name, code in CODES.items()}


def _xtc(c: _Candidates, u: float, probability: float, threshold: float, min_keep: float) -> None:
    """Drops what comes before the last that reaches the threshold."""
    if u >= probability or threshold > 0.5 or len(c.ids) < 2:
        return
    w = c.weights
    before = int((w >= np.uint64(_limit(threshold, int(w.sum())))).sum()) - 1
    if before > 0 and len(w) - before >= min_keep:
        c.keep(slice(before, None))


def _noisy_values(c: _Candidates, **draw: int) -> tuple[F64, F64]:
    a = c.values.astype(np.float64) / c.temperature
    b = gumbel(c.vocab, **draw)[c.ids]
    hi = a + b
    t = hi - a
    return hi, (a - (hi - t)) + (b - t)


# ---- draws beside sample ----


def _scored(row: F32, **how: Any) -> tuple[NDArray[np.intp], F64, F64]:
    """What sample_n and verify draw from, best first, and its scores; none of an invalid row."""
    noise = {name: how.pop(name, 0) for name in ("seed", "key", "step")}
    temperature, ties, preset = (
        how.pop("temperature", 1.0),
        how.pop("ties", "lowest"),
        how.pop("preset", "transformers"),
    )
    truncations = {name: how.pop(name) for name in ("top_k", "top_p", "min_p", "min_keep") if name in how}
    z = processed(row, **how)
    if argmax(z) < 0:
        return np.empty(0, np.intp), np.empty(0), np.empty(0)
    ids = np.flatnonzero(z > -np.inf)
    if temperature >= 1e-30:
        ids = support(z, temperature=temperature, ties=ties, steps=PRESETS[preset], **truncations)
    hi, lo = scores(z, ids, temperature, **noise)
    best_first = np.lexsort((ids, -lo, -hi))
    return ids[best_first], hi[best_first], lo[best_first]


def _first(ids: NDArray[np.intp], n: int) -> list[int]:
    return [*ids[:n].tolist(), *[-1] * (n - len(ids))]


def sample_n(row: F32, n: int, **how: Any) -> list[int]:
    """n ids without replacement, in the order of drawing, -1 behind them where there are fewer."""
    return _first(_scored(row, **how)[0], n)


def verify(row: F32, token: int, **how: Any) -> float:
    """The score of `token` less the best of the others."""
    ids, hi, lo = _scored(row, **how)
    if len(ids) == 0:
        return math.nan
    if token not in ids:
        return -math.inf
    if len(ids) == 1:
        return math.inf
    own, other = int(np.flatnonzero(ids == token)[0]), int(ids[0] == token)
    return float((hi[own] - hi[other]) + (lo[own] - lo[other]))


def sample_from_probs(
    probs: F32, *, n: int = 1, seed: int = 0, key: int = 0, step: int = 0, u: float | None = None
) -> list[int]:
    """n ids without replacement, as log p + noise orders them; at u one, by inverse CDF in id order."""
    if not ((probs >= 0) & (probs < np.inf)).all() or not (probs > 0).any():
        return [-1] * n
    if u is not None:
        running = np.cumsum(weights(probs / probs.max()), dtype=np.uint64)
        target = math.floor(Fraction(u) * int(running[-1]))
        return [int(np.searchsorted(running, np.uint64(target), side="right"))]
    ids = np.flatnonzero(probs > 0)
    hi, lo = scores(probs, ids, 1.0, seed=seed, key=key, step=step, probs=True)
    return _first(ids[np.lexsort((ids, -lo, -hi))], n)


def draw_tile(
    tile: F32, first_id: int, *, temperature: float, seed: int, step: int, key: int = 0
) -> tuple[float, float, int]:
    """The best score among the ids from first_id on, as (hi, lo, id)."""
    if not (tile < np.inf).all():
        return math.nan, 0.0, -1
    z = np.concatenate([np.full(first_id, -np.inf, np.float32), tile])
    ids = np.flatnonzero(z > -np.inf)
    if len(ids) == 0:
        return -math.inf, 0.0, -1
    hi, lo = scores(z + np.float32(0), ids, temperature, seed=seed, key=key, step=step)
    best = _best(hi, lo)
    return float(hi[best]), float(lo[best]), int(ids[best])


# ---- one truncation alone ----


def _masked(row: F32, **truncation: Any) -> F32:
    row = np.asarray(row, np.float32)
    out = np.full_like(row, -np.inf if argmax(row) >= 0 else np.nan)
    if argmax(row) >= 0:
        kept = support(row, **truncation)
        out[kept] = row[kept]
    return out


def top_k_mask(row: F32, k: int, *, min_keep: int = 1, ties: str = "lowest") -> F32:
    """The row, -inf where it is not kept; all NaN if it is invalid."""
    return _masked(row, top_k=k, min_keep=min_keep, ties=ties)


def top_p_mask(row: F32, p: float, *, temperature: float = 1.0, min_keep: int = 1, ties: str = "lowest") -> F32:
    return _masked(row, top_p=p, temperature=temperature, min_keep=min_keep, ties=ties)


def min_p_mask(row: F32, min_p: float, *, temperature: float = 1.0, min_keep: int = 1) -> F32:
    return _masked(row, min_p=min_p, temperature=temperature, min_keep=min_keep)


def _renormed(row: F32, kept: Callable[[NDArray[np.intp], F32], int], ties: str) -> F32:
    if not (row.min() >= 0 and 0 < row.max() < np.inf):
        return np.full_like(row, np.nan)
    shares, order = row / row.max(), descending(row)
    ids = order[: _with_ties(row, order, kept(order, shares), ties == "all")]
    out = np.zeros_like(row)
    out[ids] = shares[ids] * np.float32(WEIGHT_ONE / int(weights(shares[ids]).sum()))
    return out


def top_k_renorm(row: F32, k: int, *, ties: str = "lowest") -> F32:
    """What is kept of a row of probabilities, over its sum, 0 elsewhere; all NaN if it is invalid."""
    return _renormed(row, lambda order, shares: k if 0 < k < len(row) else len(row), ties)


def top_p_renorm(row: F32, p: float, *, ties: str = "lowest") -> F32:
    def kept(order: NDArray[np.intp], shares: F32) -> int:
        return _reaching(weights(shares[order]), p) if p < 1 else len(row)

    return _renormed(row, kept, ties)


# ---- scoring ----


def score(
    row: F32,
    *,
    token: int = -1,
    top_n: int = 0,
    ids: Iterable[int] = (),
    temperature: float = 1.0,
    **edits: Any,
) -> dict[str, Any]:
    """What `logprobs` says of one row, by field; -1 among token and ids is nobody."""
    z = processed(row, **edits)
    best, order = argmax(z), descending(z)[:top_n]
    if best < 0:
        logp, order = np.full(len(z), np.nan), np.full(top_n, -1)
    elif temperature < 1e-30:
        logp = np.where(np.arange(len(z)) == best, 0.0, -np.inf)
    else:
        logp = log_softmax(z, temperature)
    p = np.exp(logp)
    return {
        "chosen": logp[token] if token >= 0 else np.nan,
        "rank": 1 + int((z > z[token]).sum()) if token >= 0 and best >= 0 else 0,
        "top_ids": order,
        "top_logprobs": logp[order],
        "given": np.array([logp[i] if i >= 0 else np.nan for i in ids]),
        "entropy": -(p * np.where(p > 0, logp, 0)).sum(),
    }


# ---- attention ----


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Of one sequence: q (queries, heads, D), its last tokens; k, v (keys, kv_heads, D). Gives out and lse, in float64.

    No keys: 0 and -inf. What a query does not see is not looked at.
    """
    queries, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    position = keys - queries + np.arange(queries)
    out, lse = np.zeros((queries, heads, v.shape[-1])), np.full((queries, heads), -np.inf)
    for i in range(queries):
        seen = np.arange(keys) <= (position[i] if causal else keys)
        if window is not None:
            seen &= np.arange(keys) >= position[i] - window
        for h in range(heads):
            own = seen.copy()
            at = np.arange(keys)
            added = np.zeros(keys)
            if mask is not None:
                row = np.broadcast_to(mask[..., :keys], (queries, keys) if mask.ndim < 3 else (queries, heads, keys))[i]
                row = row[h] if mask.ndim == 3 else row
                own &= row if row.dtype == bool else row != -np.inf
                added = added if row.dtype == bool else row.astype(np.float64)
            at = at[own]
            kv = h // (heads // kv_heads)
            with np.errstate(all="ignore"):
                score = k[at, kv].astype(np.float64) @ q[i, h].astype(np.float64)
                score *= 1 / np.sqrt(dim) if scale is None else scale
                if soft_cap:
                    score = soft_cap * np.tanh(score / soft_cap)
                if slopes is not None:
                    score += np.float64(slopes[h]) * (at - position[i])
                score += added[at]
                sink = [] if sinks is None else [np.float64(sinks[h])]
                every = np.concatenate([score, sink])
                if not every.size or every.max() == -np.inf:
                    continue
                top = every.max()
                weights = np.exp(score - top)
                total = np.exp(every - top).sum()
                out[i, h] = weights @ v[at, kv].astype(np.float64) / total
                lse[i, h] = top + np.log(total)
    return out, lse


def softmax_stats(scores: Any, state: tuple[Any, Any] | None = None) -> tuple[F32, F64]:
    """scores (B, V), state two arrays (B,): the largest score so far, and the sum of exp(score - it)."""
    x = np.asarray(scores, np.float64)
    before, kept = (np.full(len(x), -np.inf), np.zeros(len(x))) if state is None else state
    with np.errstate(all="ignore"):
        top = np.maximum(x.max(-1), np.asarray(before, np.float64))  # a NaN stays
        parts = np.exp(x - top[:, None]).sum(-1), kept * np.exp(before - top)
    total = sum(np.where(m == -np.inf, 0, part) for m, part in zip((x.max(-1), before), parts, strict=True))
    return (top + 0.0).astype(np.float32), np.where(np.isposinf(top) | np.isnan(top), np.nan, total)


def merge_states(v: np.ndarray, s: np.ndarray, *, lse_base: str = "e") -> tuple[np.ndarray, np.ndarray]:
    """v (L, parts, heads, D), s (L, parts, heads); a part with lse -inf is not looked at."""
    unit = 1.0 if lse_base == "e" else np.log(2.0)
    s = s.astype(np.float64) * unit
    with np.errstate(all="ignore"):
        top = s.max(1)
        weights = np.where(s == -np.inf, 0, np.exp(s - top[:, None]))
        total = weights.sum(1)
        part = np.where(s[..., None] == -np.inf, 0, v.astype(np.float64))
        out = (part * weights[..., None]).sum(1) / total[..., None]
        lse = (top + np.log(total)) / unit
    empty = top == -np.inf
    return np.where(empty[..., None], 0, out), np.where(empty, -np.inf, lse)


# ---- blocks ----


def move_blocks(
    source: NDArray[Any], target: NDArray[Any], pairs: Iterable[tuple[int, int]], axis: int
) -> NDArray[Any]:
    """`target` after block i of `source` became block j, for all pairs (i, j): all are read, then all are written."""
    moved, before = np.moveaxis(target.copy(), axis, 0), np.moveaxis(source.copy(), axis, 0)
    for i, j in pairs:
        moved[j] = before[i]
    return np.moveaxis(moved, 0, axis)


def zero_blocks(pool: NDArray[Any], ids: Sequence[int]) -> NDArray[Any]:
    zeroed = pool.copy()
    zeroed[ids] = np.zeros((), pool.dtype)
    return zeroed


# ---- several sequences, or several tokens, at once ----


def exp64(x: Any) -> F64:
    """The package's exp in float64, for [-700, 700]; 0 below."""
    x = np.float64(x)
    safe = np.where(x >= -700, x, 0.0)
    t = safe * 1.44269504088896340736 + 1.5 * 2.0**52
    k = t - 1.5 * 2.0**52
    r = (safe - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    p = 1.0 + r / 12.0
    for i in range(11, 0, -1):
        p = 1.0 + r / i * p
    return np.asarray(np.where(x >= -700, np.ldexp(p, k.astype(np.int64)), 0.0))


def block_sums(terms: F32) -> F32:
    """The sum of every 4096 terms: 64 running sums, joined by halves."""
    sums = []
    for first in range(0, len(terms), 4096):
        block = terms[first : first + 4096]
        lanes = np.zeros(64, np.float32)
        for row in np.pad(block, (0, -len(block) % 64)).reshape(-1, 64):
            lanes = lanes + row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        sums.append(lanes[0])
    return np.array(sums, np.float32)


def _log_total(row: F32) -> np.float32:
    """The logarithm of the sum of exp(row - max) of a valid row, to the bit."""
    tops = np.array([row[i : i + 4096].max() for i in range(0, len(row), 4096)], np.float32)
    tops = np.maximum.accumulate(tops)
    total = 0.0
    for i, top in enumerate(tops):
        reference = top if top > -np.inf else np.float32(0)
        with np.errstate(all="ignore"):
            (term,) = block_sums(exp32(row[4096 * i : 4096 * (i + 1)] - reference))
        total += float(term) * (float(exp64(float(top) - float(tops[-1]))) if top > -np.inf else 0.0)
    return np.float32(log64(total))


def _conditioned(noise: F64, most: float, wanted: float) -> F64:
    below = 1.0 - exp64(noise - most)
    v = wanted - noise + log64(np.where(below > 0, below, 1.0))
    changed = wanted - np.maximum(v, 0.0) - log64(1.0 + exp64(-np.abs(v)))
    return np.where(below > 0, changed, wanted)


_noisy = scores  # beam_step has an argument of that name


def beam_step(
    scores: F64,
    rows: F32,
    *,
    n: int,
    groups: int = 1,
    eos_ids: Sequence[int] = (),
    diversity_penalty: float = 0.0,
    perturbed: F64 | None = None,
    seed: int = 0,
    step: int = 0,
    keys: Sequence[int] = (),
) -> tuple[F64, NDArray[np.int64], NDArray[np.int64], F64]:
    """(scores, beams, tokens, what orders them) of one search, (groups, n) each, from rows as they are judged."""
    beams, vocab, taken = len(scores) // groups, rows.shape[1], np.zeros(rows.shape[1])
    found = (
        np.full((groups, n), -np.inf),
        np.full((groups, n), -1),
        np.full((groups, n), -1),
        np.full((groups, n), -np.inf),
    )
    live = [i for i, score in enumerate(scores) if score > -np.inf]
    if any(not (rows[i] < np.inf).all() for i in live):
        return found[0] + np.nan, found[1], found[2], found[3] + np.nan
    for g in range(groups):
        score = np.full((beams, vocab), -np.inf)
        order = score.copy()
        for b in range(beams):
            at = g * beams + b
            ids = np.flatnonzero(rows[at] > -np.inf)
            if at not in live or not len(ids):
                continue
            logp = (rows[at] - rows[at].max()) - _log_total(rows[at])  # log_softmax, to the bit
            score[b, ids] = scores[at] + logp[ids].astype(np.float64)
            order[b] = score[b] - taken * diversity_penalty
            if perturbed is not None:
                hi, lo = _noisy(rows[at] + np.float32(0), ids, 1.0, seed=seed, key=keys[at], step=step)
                first = np.lexsort((ids, -lo, -hi))[:n]
                shift = scores[at] - float(rows[at].max()) - float(_log_total(rows[at]))
                noise = _conditioned(hi[first] + shift, hi[first[0]] + shift, perturbed[at])
                order[b] = -np.inf
                order[b, ids[first]] = noise - (taken * diversity_penalty)[ids[first]]
        best = [i for i in np.argsort(-order.reshape(-1), kind="stable")[:n] if order.flat[i] > -np.inf]
        going_on = 0
        for i, at in enumerate(best):
            token = at % vocab
            plain = perturbed is None
            found[0][g, i], found[1][g, i], found[2][g, i] = (order if plain else score).flat[at], at // vocab, token
            found[3][g, i] = order.flat[at]
            if going_on < beams and token not in eos_ids:
                taken[token] += 1
                going_on += 1
    return found


DOMAIN_COIN, DOMAIN_SEED = 4, 5


def _leave(p: F32, scale: float, q: F32) -> tuple[F32, float]:
    """max(scale * p - q, 0), and its sum; NaN where p or q has what no probability is."""
    left = np.maximum(fma32(np.float32(scale), p, -q), np.float32(0))
    fit = ((p >= 0) & (p < np.inf) & (q >= 0) & (q < np.inf)).all()
    total = 0.0
    for term in block_sums(left):
        total += float(term)
    return left, total if fit else math.nan


def verify_draft(
    rows: F32,
    draft: Sequence[int],
    *,
    q: F32 | None = None,
    method: str = "noise",
    probs: bool = False,
    parents: Sequence[int] | None = None,
    thresholds: tuple[float, float] = (1.0, 1.0),
    seed: int = 0,
    key: int = 0,
    step: int = 0,
    u: Sequence[float] | None = None,
    output_ids: Sequence[int] | None = None,
    **told: Any,
) -> tuple[list[int], list[int]]:
    """(tokens, the numbers of the drafts that stand) of one sequence; no tokens if it is invalid."""
    parent = list(range(-1, len(draft) - 1)) if parents is None else list(parents)
    children = [[i for i, above in enumerate(parent) if above == at - 1] for at in range(len(draft) + 1)]
    noise = {"seed": seed, "key": key}

    def coin(place: int) -> float:
        return (
            u[place]
            if u is not None
            else float(philox(DOMAIN_COIN, [place], seed, key, step)[0] >> np.uint64(12)) / 2**52
        )

    def edits(at: int) -> dict[str, Any]:
        history = [] if at == 0 else [draft[at - 1]]
        while at and parent[at - 1] >= 0:
            at = parent[at - 1] + 1
            history.insert(0, draft[at - 1])
        return {} if output_ids is None else {"output_ids": [*output_ids, *history]}

    def target(at: int, depth: int) -> int:
        how: dict[str, Any] = {"u": u[at]} if u is not None else {**noise, "step": step + depth}
        return sample_from_probs(rows[at], **how)[0] if probs else sample(rows[at], **how, **told, **edits(at))[0]

    def law(at: int) -> F32 | None:
        if probs:
            return np.asarray(rows[at])
        kept, z = sample(rows[at], **told, **edits(at))[1], processed(rows[at], **_edits(told), **edits(at))
        if not len(kept):
            return None
        p = np.zeros(len(z), np.float32)
        temperature = told.get("temperature", 1.0)
        if temperature < 1e-30:
            p[kept] = 1
            return p
        e = exp32(_y(z[kept], z.max(), np.float32(1.0 / min(temperature, 1e30))))
        p[kept] = e * np.float32(WEIGHT_ONE / int(weights(e).sum()))
        return np.asarray(p)

    def fits(*p: Any) -> bool:
        return all(0 <= v < math.inf for v in p)

    def left_over(p: F32, left: F32 | None) -> int:
        own: dict[str, Any] = (
            {"u": u[len(draft)]}
            if u is not None
            else {"seed": int(philox(DOMAIN_SEED, [0], seed, key, step)[0]), "key": key, "step": step}
        )
        token = -1 if left is None else sample_from_probs(left, **own)[0]
        return sample_from_probs(p, **own)[0] if token < 0 else token

    def without(p: F32, ids: list[int]) -> F32 | None:
        left = p.copy()
        left[ids] = 0
        return left if ids else None

    path: list[int] = []
    at = 0
    if method in ("noise", "typical"):
        while True:
            token = target(at, len(path))
            nexts = [i for i in children[at] if draft[i] == token]
            if method == "typical":
                nexts = [
                    i
                    for i in children[at]
                    if token >= 0 and _is_typical(rows[at], draft[i], thresholds, told | edits(at))
                ]
            if token < 0 or not nexts:
                break
            path, at = [*path, nexts[0]], nexts[0] + 1
    elif method == "ratio":
        while True:
            p, left, scale, chosen, total = law(at), None, 1.0, None, 0.0
            if p is None:
                return [], []
            for i in children[at]:
                mine = p if left is None else left
                x = draft[i]
                if not fits(mine[x], 0 if q is None else q[i][x]):
                    return [], []
                if q is None:
                    total += float(p[x])
                    stands = p[x] > 0 and (coin(at) * thresholds[1] < total or float(p[x]) >= thresholds[0])
                else:
                    stands = coin(i) * float(q[i][x]) < scale * float(mine[x])
                if stands:
                    chosen = i
                    break
                if q is not None:
                    left, rest = _leave(mine, scale, q[i])
                    if rest != rest:
                        return [], []
                    if rest == 0:
                        break
                    scale = 1.0 / rest
            if chosen is None:
                token = left_over(p, without(p, [draft[i] for i in children[at]]) if q is None else left)
                break
            path, at = [*path, chosen], chosen + 1
    else:
        scale, there, scale_there = 1.0, 0, 1.0
        p = law(0)
        for i, x in enumerate(draft):
            if p is None or not fits(p[x], 1 if q is None else q[i][x]):
                return [], []
            own, of_q = float(p[x]), 1.0 if q is None else float(q[i][x])
            scale = min(scale * (own / of_q) if of_q > 0 else float(own > 0), 1.0)
            chance = scale
            if i + 1 < len(draft):
                p = law(i + 1)
                if p is None:
                    return [], []
                rest = scale * (1.0 - float(p[draft[i + 1]])) if q is None else _leave(p, scale, q[i + 1])[1]
                if rest != rest:
                    return [], []
                whole = rest + (1.0 - scale)
                chance = rest / whole if whole > 0 else 1.0
            if coin(i) < chance:
                there, scale_there = i + 1, scale
        path, p = list(range(there)), law(there)
        if p is None:
            return [], []
        left = None
        if there < len(draft):
            left, rest = (without(p, [draft[there]]), 0.0) if q is None else _leave(p, scale_there, q[there])
            if rest != rest:
                return [], []
        token = left_over(p, left)
    return ([*(draft[i] for i in path), token], path) if token >= 0 else ([], [])


def _edits(told: dict[str, Any]) -> dict[str, Any]:
    names = ("bias", "mask", "repetition_penalty", "frequency_penalty", "presence_penalty", "prompt_ids")
    return {name: told[name] for name in names if name in told}


def _is_typical(row: F32, token: int, limits: tuple[float, float], told: dict[str, Any]) -> bool:
    names = ("temperature", "output_ids")
    scored = score(row, token=token, **_edits(told), **{name: told[name] for name in names if name in told})
    return bool(math.exp(scored["chosen"]) > min(limits[0], limits[1] * math.exp(-scored["entropy"])))


# ---- the KV-cache ----


def _fold(a: int, b: int) -> int:
    product = a * b
    return product >> 64 ^ product & 2**64 - 1


def _tagged(kind: bytes, key: str | bytes | int) -> bytes:
    if isinstance(key, int):
        type_, data = b"i", key.to_bytes(key.bit_length() // 8 + 1, "little", signed=True)
    else:
        type_, data = (b"s", key.encode("utf-8", "surrogatepass")) if isinstance(key, str) else (b"b", key)
    return kind + type_ + len(data).to_bytes(4, "little") + data


def prefix_hashes(
    tokens: Any, block_size: int, seed: int = 0, adapter: Any = None, salt: Any = None, images: Any = ()
) -> list[int]:
    """The hash of each full block, of its tokens, keys and all that is before it. PrefixCache.hashes."""
    a, b = 0x6A09E667F3BCC908, 0xBB67AE8584CAA73B  # the fractions of the square roots of 2 and 3
    extra = {0: b"".join(_tagged(kind, key) for kind, key in ((b"a", adapter), (b"s", salt)) if key is not None)}
    for key, position in sorted(images, key=lambda image: int(image[1])):
        block, offset = divmod(position, block_size)
        extra[block] = extra.get(block, b"") + offset.to_bytes(4, "little") + _tagged(b"m", key)
    h, hashes = _fold(seed ^ a, block_size ^ b), []
    for block in range(len(tokens) // block_size):
        keys, own = extra.get(block, b""), [int(t) for t in tokens[block * block_size : (block + 1) * block_size]]
        h = _fold(h ^ len(keys), b)
        for i in range(0, len(keys), 8):
            h = _fold(h ^ int.from_bytes(keys[i : i + 8], "little"), b)
        for first, second in zip(own[::2], [*own[1::2], 0], strict=False):
            h = _fold(first ^ a, second ^ h)
        h = _fold(h, b)
        hashes.append(h)
    return hashes


# ---- keys and values ----


def narrow(x: Any, dtype: str) -> Any:
    """float32 to the nearest of "f32", "f16" or "bf16" (its bits, uint16), ties to even; every NaN to the quiet one."""
    x = np.where(np.isnan(x), np.float32(np.nan), np.float32(x)).astype(np.float32)
    if dtype == "f32":
        return x
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return np.where(np.isnan(x), np.uint16(0x7E00), x.astype(np.float16).view(np.uint16)).view(np.float16)
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded >> np.uint32(16)).astype(np.uint16)


def quantise(x: Any) -> tuple[NDArray[np.int8], F32]:
    """Codes of rows along the last axis, and (..., 2): scale and zero. A code c stands for scale * (c - zero)."""
    x = np.float32(x)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    extent = high.astype(np.float64) - low
    blank = extent < 2.0**-126
    scale = np.where(blank, 1, extent / 255).astype(np.float32)
    zero = np.where(blank, 0, np.rint(np.float32(-128) - low / scale)).astype(np.float32)
    codes = np.where(blank, 0, np.clip(np.rint(x / scale) + zero, -128, 127)).astype(np.int8)
    return codes, np.concatenate([np.where(blank, 0, scale), zero], -1).astype(np.float32)


def dequantise(codes: NDArray[np.int8], scales: F32) -> F32:
    return scales[..., :1] * (codes - scales[..., 1:])


def turn(x: Any, cos: F32, sin: F32, *, interleaved: bool = False) -> F32:
    """Rows (..., head_dim) turned pair by pair, in float32; cos and sin broadcast against (..., pairs)."""
    turned: F32 = np.array(x, np.float32)
    pairs = cos.shape[-1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    )
    a, b = turned[..., first], turned[..., second]
    with np.errstate(all="ignore"):
        turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return turned

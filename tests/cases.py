"""One Case an operation: what it is run on, how, and what reference.py says. Everything else follows from the list:
test_cases.py runs every Case on every ISA at every size, and the replay driver takes its blobs from here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import cases_chain
import cases_spec
import ml_dtypes
import numpy as np

import lanewise
from lanewise import _ops, reference

SIZES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 4099, 40001, 262144)
DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

Results = dict[str, np.ndarray]
Alloc = Callable[[tuple[int, ...], Any], np.ndarray]


class Case(NamedTuple):
    """run(x, settings, alloc) gives named arrays, every output that can be placed made by alloc(shape, dtype)."""

    name: str
    inputs: Callable[[np.random.Generator, int, np.dtype], np.ndarray]
    settings: Callable[[int], list[dict[str, Any]]]
    run: Callable[[np.ndarray, dict[str, Any], Alloc], Results]
    reference: Callable[[np.ndarray, dict[str, Any]], Results]
    tolerance: Callable[[np.ndarray, dict[str, Any], np.ndarray], np.ndarray] | None = None  # None: bit for bit
    dtypes: tuple[str, ...] = ("f32", "f16", "bf16")


# ---- rows ----


def realistic(rng: np.random.Generator, n: int) -> np.ndarray:
    """A near-Gaussian body off centre with a stretched tail, as language models give."""
    z = rng.standard_normal(n)
    return rng.normal(3, 7) + 3.4 * (z + 0.25 * np.maximum(z - 1.5, 0) ** 2)


def special(rng: np.random.Generator, n: int) -> np.ndarray:
    """Zeros of both signs, subnormals, values far below the maximum, -inf."""
    values = [0.0, -0.0, 1e-40, -1e-40, 1e-45, -87.3, -87.4, -104.0, -1e30, -np.inf, 3.5]
    return rng.choice(values, n)


def with_nan(rng: np.random.Generator, n: int) -> np.ndarray:
    x = realistic(rng, n)
    x[rng.integers(n)] = np.nan
    return x


def with_inf(rng: np.random.Generator, n: int) -> np.ndarray:
    x = realistic(rng, n)
    x[rng.integers(n)] = np.inf
    return x


def masked(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.1, realistic(rng, n), -np.inf)


ORDERED = {
    "realistic": realistic,
    "special": special,
    "masked": masked,
    "tied": lambda rng, n: np.round(rng.standard_normal(n)),
    "equal": lambda rng, n: np.full(n, -3.25),
    "ascending": lambda rng, n: np.sort(realistic(rng, n)),
    "late": lambda rng, n: np.concatenate([np.full(n - 1, -np.inf), [10.0]]),  # blocks of nothing before the one value
    "nothing": lambda rng, n: np.full(n, -np.inf),
    "with +inf": with_inf,
}
ANY = ORDERED | {"with NaN": with_nan}


def rows(kinds: dict[str, Callable[..., np.ndarray]]) -> Callable[..., np.ndarray]:
    def make(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
        some = kinds.values() if n <= 5000 else list(kinds.values())[:2]
        with np.errstate(over="ignore"):
            return np.stack([kind(rng, n) for kind in some]).astype(np.float32).astype(dtype)

    return make


# ---- softmax and its kin ----

EPS = 2.0**-24  # half a unit in the last place of 1


def exponent(x: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    """|x - max| / T, which the float32 subtraction and product have rounded; nothing beyond 88 is left of it."""
    t = np.broadcast_to(np.float64(settings.get("temperature", 1.0)), len(x))[:, None]
    with np.errstate(all="ignore"):
        y = (x.max(-1, keepdims=True) - x) / np.maximum(t, 1e-30)
    return np.minimum(np.where(np.isfinite(y), y, 0), 88)


def greedy_rows(x: np.ndarray, settings: dict[str, Any], rest: float, chosen: float) -> np.ndarray | None:
    if settings.get("temperature", 1.0) != 0:
        return None
    out = np.full(x.shape, rest)
    for i, row in enumerate(x):
        best = reference.argmax(row)
        out[i] = np.nan if best < 0 else out[i]
        out[i, max(best, 0)] = np.nan if best < 0 else chosen
    return out


def softmax_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    greedy = greedy_rows(x, settings, 0.0, 1.0)
    return {"out": reference.softmax(x, **settings) if greedy is None else greedy}


def log_softmax_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    greedy = greedy_rows(x, settings, -np.inf, 0.0)
    return {"out": reference.log_softmax(x, **settings) if greedy is None else greedy}


def mapped(op: Callable[..., np.ndarray], reduces: bool = False) -> Callable[..., Results]:
    def run(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
        out = alloc(x.shape[:-1] if reduces else x.shape, np.float32)
        assert op(x, **settings, out=out) is out
        return {"out": out}

    return run


def temperatures(n: int) -> list[dict[str, Any]]:
    return [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 1e31}] if n <= 5000 else [{}]


def positive_temperatures(n: int) -> list[dict[str, Any]]:
    return [s for s in temperatures(n) if s.get("temperature") != 0] + ([{"temperature": 1e-30}] if n <= 5000 else [])


VALUES = [
    Case(
        "softmax",
        rows(ANY),
        temperatures,
        mapped(lanewise.softmax),
        softmax_reference,
        lambda x, s, want: want * EPS * (16 + 4 * exponent(x, s)) + 1.3e-38,  # below exp(-87.33) is 0
    ),
    Case(
        "log_softmax",
        rows(ANY),
        temperatures,
        mapped(lanewise.log_softmax),
        log_softmax_reference,
        lambda x, s, want: EPS * (16 + 6 * np.where(np.isfinite(want), np.abs(want), 0)),
    ),
    Case(
        "logsumexp",
        rows(ANY),
        positive_temperatures,
        mapped(lanewise.logsumexp, reduces=True),
        lambda x, s: {"out": reference.logsumexp(x, **s)},
        lambda x, s, want: EPS * (16 + 4 * np.where(np.isfinite(want), np.abs(want), 0)),
    ),
    Case(
        "scale",
        rows(ANY),
        lambda n: [{"temperature": t} for t in (0.7, 1e-30, 3.0)],
        mapped(lanewise.scale),
        lambda x, s: {"out": reference.scale(x, **s)},
    ),
]


# ---- choosing ----


def run_argmax(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    return {"ids": lanewise.argmax(x, on_invalid="mark", out=alloc(x.shape[:1], np.int64))}


def run_top_k(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    if "ties" in settings:  # how wide the result is, only the operation knows
        values, ids = lanewise.top_k(x, **settings)
        return {"values": values, "ids": ids}
    shape = (len(x), settings["k"])
    values, ids = lanewise.top_k(x, **settings, out=(alloc(shape, np.float32), alloc(shape, np.int64)))
    return {"values": values, "ids": ids}


def top_k_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    k, found = settings["k"], []
    for row in x:
        values, ids = reference.top_k(row, k)
        if settings.get("ties") == "all":
            values, ids = reference.top_k(row, int((row >= values[-1]).sum()))
        found.append((values, ids))
    width = max(len(ids) for _, ids in found)
    return {
        "values": np.stack([np.pad(v, (0, width - len(v)), constant_values=-np.inf) for v, _ in found]),
        "ids": np.stack([np.pad(i, (0, width - len(i)), constant_values=-1) for _, i in found]).astype(np.int64),
    }


def all_k(n: int) -> list[dict[str, Any]]:
    some = {1, 2, 7, 50, 129, 1000, n // 64 + 1} | ({n - 1, n} if n <= 5000 else set())
    fit = [{"k": k} for k in sorted(some) if 1 <= k <= n]
    return fit + [s | {"ties": "all"} for s in fit[:3]]


def sample_settings(n: int) -> list[dict[str, Any]]:
    some = np.arange(n) % 7 != 3
    history = [0, n // 2, n // 2, n - 1]
    few = [
        {"seed": 1, "step": 0},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 2**64 - 1, "step": 2**32 - 1},
        {"temperature": 0.7, "top_p": 0.95, "seed": 7, "step": 3},
        {"temperature": 1.3, "top_p": 0.9, "u": 0.999},
        {
            "temperature": 0.9,
            "top_k": 40,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.2,
            "presence_penalty": 0.1,
            "prompt_ids": history,
            "output_ids": history[1:],
            "bias": {0: 2.5, n - 1: -np.inf},
            "mask": some,
            "seed": 5,
            "step": 9,
        },
    ]
    many = [
        {"temperature": 0.0, "seed": 1, "step": 1},
        {"temperature": 1e-20, "seed": 1, "step": 1},
        {"temperature": 1e31, "top_p": 0.5, "seed": 1, "step": 1},
        {"top_k": 1, "seed": 3, "step": 0},
        {"top_k": 3, "ties": "all", "seed": 3, "step": 0},
        {"top_p": 0.3, "ties": "all", "seed": 3, "step": 0},
        {"top_k": 3, "top_p": 0.5, "ties": "top_k", "seed": 3, "step": 0},
        {"top_p": 0.0, "seed": 3, "step": 0},
        {"top_p": 1e-12, "min_keep": 3, "seed": 3, "step": 0},
        {"min_p": 1.0, "min_keep": 4, "u": 0.5},
        {"min_p": 0.05, "temperature": 2.0, "u": 0.0},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7, "preset": "llama.cpp", "seed": 4, "step": 4},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7, "preset": "vllm", "seed": 4, "step": 4},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7, "preset": "mlx-lm", "u": 0.25},
        {"mask": some[: n // 2 + 1], "top_p": 0.99, "seed": 6, "step": 2},
    ]
    return few + many if n <= 5000 else few


def for_rows(settings: dict[str, Any], count: int) -> dict[str, Any]:
    """The settings with histories, which are of one row, as one list a row."""
    lists = {name: [settings[name]] * count for name in ("prompt_ids", "output_ids") if name in settings}
    return settings | lists


def run_sample(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    tokens, support = lanewise.sample(
        x,
        **for_rows(settings, len(x)),
        keys=None if "u" in settings else [9] * len(x),
        return_support=True,
        on_invalid="mark",
        out=alloc(x.shape[:1], np.int64),
    )
    return {"tokens": tokens, **support._asdict()}


def sample_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    key = {} if "u" in settings else {"key": 9}
    found = [reference.sample(row, **settings, **key) for row in x]
    return {
        "tokens": np.array([token for token, _, _ in found]),
        "ids": np.concatenate([kept for _, kept, _ in found]).astype(np.int64),
        "logprobs": np.concatenate([logprobs for _, _, logprobs in found]),
        "indptr": np.cumsum([0, *(len(kept) for _, kept, _ in found)]),
    }


# ---- draws beside sample ----


def keyed(settings: dict[str, Any]) -> dict[str, Any]:
    return settings if "u" in settings else settings | {"key": 9}


def without_u(n: int) -> list[dict[str, Any]]:
    found = [s for s in sample_settings(n) if "u" not in s]
    return found if n <= 5000 else found[1:2] + found[3:]


def run_sample_n(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    how = for_rows(settings, len(x))
    out = alloc((len(x), how["n"]), np.int64)
    return {"ids": lanewise.sample_n(x, **how, keys=[9] * len(x), on_invalid="mark", out=out)}


def run_verify(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    how = for_rows(settings, len(x)) | {"keys": [9] * len(x), "on_invalid": "mark"}
    tokens = np.stack([lanewise.sample(x, **how).clip(0), np.full(len(x), x.shape[1] // 2)])
    won, lost = (lanewise.verify(x, **how, token=t, out=alloc(x.shape[:1], np.float64)) for t in tokens)
    return {"won": won, "tokens": tokens.T, "lost": lost}


def verify_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    how = settings | {"key": 9}
    tokens = [max(reference.sample_n(row, 1, **how)[0], 0) for row in x]
    return {
        "won": np.array([reference.verify(row, t, **how) for row, t in zip(x, tokens, strict=True)]),
        "tokens": np.stack([tokens, np.full(len(x), x.shape[1] // 2)], axis=1),
        "lost": np.array([reference.verify(row, x.shape[1] // 2, **how) for row in x]),
    }


def probs_of(kinds: dict[str, Callable[..., np.ndarray]]) -> Callable[..., np.ndarray]:
    of_logits = rows(kinds)

    def make(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
        x = of_logits(rng, n, np.dtype(np.float32)).astype(np.float64)
        top = x.max(1, where=np.isfinite(x), initial=-1e30, keepdims=True)
        with np.errstate(all="ignore"):
            p = np.exp(x - top)
            weights = [*p, p[0] * 1e-40, p[0] * 3e38, np.full(n, -0.0)]  # subnormals, sums that overflow, nothing
            if n > 1:
                weights.append(np.where(np.arange(n) == n // 2, -1e-45, p[0]))
            return np.stack(weights).astype(np.float32).astype(dtype)

    return make


def probs_settings(n: int) -> list[dict[str, Any]]:
    noise = [{"seed": 1, "step": 0}, {"seed": 2**64 - 1, "step": 2**32 - 1}][: 2 if n <= 5000 else 1]
    several = [{"n": k, **noise[0]} for k in {1, min(n, 70), min(n, 4099)}]
    return noise + several + [{"u": u} for u in (0.0, 0.3, 0.999, 1 - 2.0**-53)]


def run_probs(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    out = alloc((len(x), settings["n"]) if "n" in settings else (len(x),), np.int64)
    keys = None if "u" in settings else [9] * len(x)
    return {"ids": lanewise.sample_from_probs(x, **settings, keys=keys, on_invalid="mark", out=out)}


def probs_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    ids = np.array([reference.sample_from_probs(row, **keyed(settings)) for row in x])
    return {"ids": ids if "n" in settings else ids[:, 0]}


def tile_rows(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    return rows(ANY)(rng, n, dtype)


def tile_settings(n: int) -> list[dict[str, Any]]:
    return [
        {"first_id": first, "temperature": t, "seed": 2, "step": 1, "key": 9}
        for first, t in product((0, 1, 64, 4095, 4160, 70001) if n <= 5000 else (4160, 70001), (0.0, 0.7, 1e31))
        if n <= 5000 or t == 0.7
    ]


def tiles(draw: Callable[..., tuple[float, float, int]]) -> Callable[..., Results]:
    def run(x: np.ndarray, settings: dict[str, Any], *_: Any) -> Results:
        drawn = [draw(row, **settings) for row in x]
        return {"score": np.array([d[:2] for d in drawn]), "token": np.array([d[2] for d in drawn])}

    return run


CHOICES = [
    Case(
        "argmax",
        rows(ANY),
        lambda n: [{}],
        run_argmax,
        lambda x, s: {"ids": np.array([reference.argmax(row) for row in x])},
    ),
    Case("top_k", rows(ORDERED), all_k, run_top_k, top_k_reference),
    Case("sample", rows(ANY), sample_settings, run_sample, sample_reference),
    Case(
        "sample_n",
        rows(ANY),
        lambda n: (
            [s | {"n": k} for s in without_u(n) for k in {min(n, 3), min(n, 70)}] + [{"n": n, "seed": 4, "step": 0}]
        ),
        run_sample_n,
        lambda x, s: {"ids": np.array([reference.sample_n(row, **s, key=9) for row in x])},
    ),
    Case("verify", rows(ANY), without_u, run_verify, verify_reference),
    Case("sample_from_probs", probs_of(ANY), probs_settings, run_probs, probs_reference),
    Case("draw_tile", tile_rows, tile_settings, tiles(lanewise.drawing.draw_tile), tiles(reference.draw_tile)),
]


# ---- rows in, rows out ----


def each(op: Callable[..., np.ndarray], x: np.ndarray, settings: dict[str, Any]) -> Results:
    return {"out": np.stack([op(row, **settings) for row in x])}


def truncations(*some: dict[str, Any], more: tuple[dict[str, Any], ...] = ()) -> Callable[[int], list[dict[str, Any]]]:
    return lambda n: [*some, *more] if n <= 5000 else [*some]


def truncation(name: str, kinds: dict[str, Callable[..., np.ndarray]], settings: Callable[..., Any]) -> Case:
    op, spec = getattr(lanewise, name), getattr(reference, name)

    def run(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
        out = alloc(x.shape, np.float32)
        assert op(x, **settings, on_invalid="mark", out=out) is out
        return {"out": out}

    return Case(name, rows(kinds), settings, run, lambda x, s: each(spec, x, s))


def likely(kind: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def make(rng: np.random.Generator, n: int) -> np.ndarray:
        with np.errstate(all="ignore"):
            x = kind(rng, n)
            return np.exp(x - x.max())

    return make


PROBABILITIES = {
    "realistic": likely(realistic),
    "flat": lambda rng, n: rng.uniform(0.9, 1.0, n) / n,
    "special": lambda rng, n: rng.choice([0.0, -0.0, 1e-45, 1e-40, 1.2e-38, 1e-7, 0.25, 0.5], n),
    "subnormal": lambda rng, n: rng.integers(1, 9, n) * 2.0**-149,
    "huge": lambda rng, n: rng.uniform(1e38, 3e38, n),
    "masked": likely(masked),
    "tied": lambda rng, n: rng.integers(0, 4, n) / 4,
    "equal": lambda rng, n: np.full(n, 1 / n),
    "ascending": lambda rng, n: np.sort(likely(realistic)(rng, n)),
    "nothing": lambda rng, n: np.zeros(n),
    "negative": lambda rng, n: np.where(np.arange(n) == rng.integers(n), -1e-3, likely(realistic)(rng, n)),
    "with NaN": lambda rng, n: abs(with_nan(rng, n)),
    "with +inf": lambda rng, n: abs(with_inf(rng, n)),
}

ALL_K = truncations({"k": 1}, {"k": 50}, {"k": 1000}, {"k": 9, "ties": "all"}, more=({"k": 0}, {"k": 2**62}, {"k": 3}))
ALL_P = truncations(
    {"p": 0.9},
    {"p": 0.999999},
    {"p": 0.4, "ties": "all"},
    more=({"p": 0.0}, {"p": -1.0}, {"p": 1.0}, {"p": 1e-300}, {"p": 0.5}, {"p": np.nextafter(1.0, 0.0)}),
)


def histories(n: int) -> list[dict[str, Any]]:
    history = [0, n // 2, n // 2, n - 1, 0, 0]
    return [
        {"repetition_penalty": 1.3, "prompt_ids": history},
        {"repetition_penalty": 0.7, "frequency_penalty": 0.2, "presence_penalty": 0.1, "output_ids": history},
        {"frequency_penalty": 3e38, "presence_penalty": -3e38, "prompt_ids": history, "output_ids": history[3:]},
        {},
    ]


def biases(n: int) -> list[dict[str, Any]]:
    dense = np.arange(n, dtype=np.float32) % 7 - 3
    dense[n // 2] = -np.inf
    return [{"bias": {0: 2.5, n - 1: -np.inf, n // 2: -3.4e38}}, {"bias": {}}, {"bias": dense}]


def masks(n: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(n)
    words = rng.integers(-(2**31), 2**31, -(-n // 32)).astype(np.int32)
    words[rng.random(len(words)) < 0.3] = -1
    return [
        {"mask": rng.random(n) < 0.5},
        {"mask": np.ones(n // 2 + 1, bool)},
        {"mask": words, "same_dtype": True},
        {"mask": words[: len(words) // 2].view(np.uint32)},
        {"mask": np.full(len(words) + 2, -1, np.int32)},
    ]


def run_edit(op: Callable[..., np.ndarray]) -> Callable[..., Results]:
    def run(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
        kw = for_rows(settings, len(x))
        out = alloc(x.shape, x.dtype if kw.pop("same_dtype", False) else np.float32)
        assert op(x, **kw, out=out) is out
        return {"out": out}

    return run


def bitmask_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    mask = settings["mask"]
    allowed = mask if mask.dtype == bool else np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
    return each(reference.apply_token_bitmask, x, {"mask": allowed})


FILTERS = [
    truncation("top_k_mask", ANY, lambda n: [*ALL_K(n), {"k": 2, "min_keep": 70}]),
    truncation(
        "top_p_mask",
        ANY,
        lambda n: [
            *ALL_P(n),
            {"p": 0.9, "temperature": 0.7},
            *truncations(more=({"p": 0.9, "temperature": 0.0, "min_keep": 3}, {"p": 1e-9, "min_keep": 5}))(n),
            *truncations(more=({"p": 0.9, "temperature": 1e31}, {"p": 0.5, "temperature": 1e-20}))(n),
        ],
    ),
    truncation(
        "min_p_mask",
        ANY,
        truncations(
            {"min_p": 0.05},
            {"min_p": 0.3, "temperature": 2.0, "min_keep": 7},
            more=({"min_p": 0.0}, {"min_p": 1.0}, {"min_p": 1e-320}, {"min_p": 0.5, "temperature": 0.0}),
        ),
    ),
    truncation("top_k_renorm", PROBABILITIES, ALL_K),
    truncation("top_p_renorm", PROBABILITIES, ALL_P),
    Case(
        "apply_penalties",
        rows(ANY),
        histories,
        run_edit(lanewise.apply_penalties),
        lambda x, s: each(reference.apply_penalties, x, s),
    ),
    Case("apply_bias", rows(ANY), biases, run_edit(lanewise.apply_bias), lambda x, s: each(reference.apply_bias, x, s)),
    Case("apply_token_bitmask", rows(ANY), masks, run_edit(lanewise.apply_token_bitmask), bitmask_reference),
]


# ---- scoring ----


def score_settings(n: int) -> list[dict[str, Any]]:
    history = [0, n // 2, n // 2, n - 1]
    few = [
        {"token": n // 2, "top_n": min(n, 20), "ids": [0, -1, n - 1], "entropy": True},
        {
            "token": n - 1,
            "top_n": 1,
            "temperature": 0.7,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.2,
            "presence_penalty": 0.1,
            "prompt_ids": history,
            "output_ids": history[1:],
            "bias": {0: 2.5, n - 1: -np.inf},
            "mask": np.arange(n) % 7 != 3,
        },
    ]
    many = [
        {"token": 0, "top_n": n, "temperature": 0.0, "entropy": True, "ids": range(n)},
        {"token": -1, "top_n": n // 64 + 1, "temperature": 1e31, "entropy": True},
        {"ids": [n - 1] * 3, "temperature": 2.0},
        {"entropy": True, "temperature": 1e-3, "mask": np.arange(n) % 7 != 3},
        {"top_n": n // 2 + 1, "temperature": 1e-30},
    ]
    return few + many if n <= 5000 else few


def score_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    how = {name: value for name, value in settings.items() if name != "entropy"}
    found = [reference.score(row, **how) for row in x]
    return {name: np.array([row[name] for row in found]) for name in asked(settings)}


def asked(settings: dict[str, Any]) -> list[str]:
    """The fields that settings ask for, in their order."""
    asks = {"chosen": "token", "rank": "token", "top_ids": "top_n", "top_logprobs": "top_n", "given": "ids"}
    return [name for name in lanewise.Logprobs._fields if asks.get(name, name) in settings]


def run_logprobs(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    told, count = for_rows(settings, len(x)), len(x)
    if "token" in told:
        told["tokens"] = [told.pop("token")] * count
    widths = {
        "top_ids": (told.get("top_n"),),
        "top_logprobs": (told.get("top_n"),),
        "given": (len(told.get("ids", ())),),
    }
    fields = asked(settings)
    out = lanewise.Logprobs(
        *(
            alloc((count, *widths.get(name, ())), np.int64 if name in ("rank", "top_ids") else np.float32)
            if name in fields
            else None
            for name in lanewise.Logprobs._fields
        )
    )
    assert lanewise.logprobs(x, **told, out=out) is out
    return {name: getattr(out, name) for name in fields}


SCORES = [
    Case(
        "logprobs",
        rows(ANY),
        score_settings,
        run_logprobs,
        score_reference,
        lambda x, s, want: EPS * (16 + 6 * np.where(np.isfinite(want), np.abs(want), 0)),
    )
]


# ---- arithmetic ----


def as_rows(op: str, dtype: Any, extra: int = 0) -> Callable[..., Results]:
    code = {2: 1, 4: 0}

    def run(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
        out = alloc((x.size + extra,), dtype)
        kind = 2 if x.dtype == DTYPES["bf16"] else code.get(x.dtype.itemsize, 0)
        _ops.run_rows(op, x.reshape(-1), out, dtype=kind)
        return {"out": out}

    return run


def noise(op: str, dtype: Any) -> Callable[..., Results]:
    def run(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
        out = alloc((x.size,), dtype)
        _ops.run_noise(op, out, **settings)
        return {"out": out}

    return run


def exponents(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    x = np.concatenate([[0.0, -0.0, -87.33, -87.34, -np.inf, np.nan, -1e38, 88.7], rng.uniform(-90, 10, n)])
    return x[:n].astype(dtype)


def downward(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    x = np.concatenate([[0.0, -0.0, -87.0, -87.1, -np.inf, -1e38], rng.uniform(-90, 0, n)])
    return x[:n].astype(dtype)


def positives(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    return np.exp(rng.uniform(-700, 700, n))


def halves(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    width = f"u{dtype.itemsize}"
    return rng.integers(0, 2 ** (8 * dtype.itemsize), n, dtype=width).view(dtype)


def fractions(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    return np.exp(rng.uniform(-40, 0, n)).astype(dtype)


def with_total(w: np.ndarray) -> np.ndarray:
    return np.append(w, w.sum(dtype=np.uint64))


def widened(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float32)
    return np.where(np.isnan(wide), np.float32(np.nan), wide)


def noise_settings(n: int) -> list[dict[str, Any]]:
    return [
        {"first": 0, "domain": 2, "seed": 1, "key": 2, "step": 3},
        {"first": 4090, "domain": 3, "seed": 2**64 - 1, "key": 2**63, "step": 2**32 - 1},
    ]


def gumbel_reference(x: np.ndarray, s: dict[str, Any]) -> Results:
    all_ids = reference.gumbel(s["first"] + x.size, s["seed"], s["key"], s["step"])
    return {"out": all_ids[s["first"] :]}


ARITHMETIC = [
    Case(
        "exp32",
        exponents,
        lambda n: [{}],
        as_rows("exp32", np.float32),
        lambda x, s: {"out": reference.exp32(x)},
        dtypes=("f32",),
    ),
    Case(
        "exp_rough",
        downward,
        lambda n: [{}],
        as_rows("exp_rough", np.float32),
        lambda x, s: {"out": reference.exp_rough(x)},
        dtypes=("f32",),
    ),
    Case(
        "log64",
        positives,
        lambda n: [{}],
        as_rows("log64", np.float64),
        lambda x, s: {"out": reference.log64(x)},
        dtypes=("f32",),
    ),
    Case("widen", halves, lambda n: [{}], as_rows("widen", np.float32), lambda x, s: {"out": widened(x)}),
    Case(
        "weights",
        fractions,
        lambda n: [{}],
        as_rows("weights", np.uint64, extra=1),
        lambda x, s: {"out": with_total(reference.weights(x))},
        dtypes=("f32",),
    ),
    Case(
        "philox",
        fractions,
        noise_settings,
        noise("philox", np.uint64),
        lambda x, s: {
            "out": reference.philox(s["domain"], s["first"] + np.arange(x.size), s["seed"], s["key"], s["step"])
        },
        dtypes=("f32",),
    ),
    Case("gumbel", fractions, noise_settings, noise("gumbel", np.float64), gumbel_reference, dtypes=("f32",)),
]

CHAINS = [
    Case("chain", rows(ANY), cases_chain.chain_settings, cases_chain.run_chains, cases_chain.chain_reference),
]

DECODING = [
    Case(
        "beam_step",
        lambda rng, n, dtype: rows(ANY)(rng, n, dtype),
        cases_spec.beam_settings,
        cases_spec.run_beam_step,
        cases_spec.beam_reference,
    ),
    Case(
        "verify_draft",
        lambda rng, n, dtype: rows(ANY)(rng, n, dtype),
        cases_spec.draft_settings,
        cases_spec.run_verify_draft,
        cases_spec.draft_reference,
    ),
]

from cases_attention import ATTENTION  # noqa: E402 - these need Case
from cases_kv import KV  # noqa: E402
from cases_transfer import TRANSFER  # noqa: E402

CASES = VALUES + CHOICES + FILTERS + SCORES + CHAINS + DECODING + ATTENTION + ARITHMETIC + KV + TRANSFER

"""What sample promises beyond single decisions: laws, independence of batch and truncation, seeds, errors."""

from __future__ import annotations

import copy
import ctypes
import ctypes.util
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lanewise
from lanewise import InvalidLogitsError, SamplingParams, Stream, _ops, reference

from laws import chi_square, kolmogorov_smirnov

DRAWS = 20000
LOGITS = (np.random.default_rng(5).standard_normal(300) * 1.5).astype(np.float32)


def law(kept: np.ndarray | None = None, temperature: float = 1.0) -> np.ndarray:
    p = np.exp((LOGITS.astype(np.float64) - LOGITS.max()) / temperature)
    if kept is not None:
        p[np.setdiff1d(np.arange(len(p)), kept)] = 0
    return p / p.sum()


def many(**kw: Any) -> np.ndarray:
    """DRAWS tokens of LOGITS, a row of the batch each: same seed, other keys."""
    return lanewise.sample(np.broadcast_to(LOGITS, (DRAWS, len(LOGITS))), **kw)


def counts(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=len(LOGITS))


# ---- laws ----


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 20},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.8, "temperature": 1.4},
    ],
    ids=str,
)
def test_draws_follow_the_law(setting: dict[str, float]) -> None:
    kept = reference.support(LOGITS, **setting)
    assert chi_square(counts(many(seed=2026, step=1, **setting)), law(kept, setting.get("temperature", 1.0))) > 1e-4


def test_draws_at_other_steps_and_seeds_follow_the_law_too() -> None:
    rows = np.broadcast_to(LOGITS, (DRAWS, len(LOGITS)))
    by_step = lanewise.sample(rows, seed=[7] * DRAWS, step=np.arange(DRAWS))
    by_seed = lanewise.sample(rows, seed=np.arange(DRAWS), step=0)
    for tokens in (by_step, by_seed):
        assert chi_square(counts(tokens), law()) > 1e-4
    together = np.zeros((8, 8))  # what one step draws says nothing of the next
    quantile = np.searchsorted(np.cumsum(np.bincount(by_step, minlength=300) / DRAWS), np.linspace(0, 1, 9)[1:-1])
    cell = np.searchsorted(quantile, by_step)
    np.add.at(together, (cell[:-1], cell[1:]), 1)
    rows_, columns = together.sum(1, keepdims=True), together.sum(0, keepdims=True)
    assert chi_square(together.ravel(), (rows_ * columns).ravel()) > 1e-4


def test_no_seed_draws_fresh_entropy() -> None:
    tokens = [lanewise.sample(LOGITS) for _ in range(3000)]
    assert chi_square(np.bincount(tokens, minlength=300), law()) > 1e-4
    assert len({tuple(many()[:50]) for _ in range(3)}) == 3


def test_u_on_a_grid_is_the_cdf() -> None:
    tokens = many(u=(np.arange(DRAWS) + 0.5) / DRAWS)
    assert (np.diff(tokens) >= 0).all()
    assert np.abs(counts(tokens) - law() * DRAWS).max() <= 1.01


def test_noise_is_independent_gumbel() -> None:
    n, ids = 4000, [0, 1, 63, 64, 4095]
    noise = np.empty((n, 4096))
    for step in range(n):
        _ops.run_noise("gumbel", noise[step], 0, 0, 1, 2, step)
    for i in ids:
        g = np.sort(noise[:, i])
        assert kolmogorov_smirnov(g, np.exp(-np.exp(-g))) > 1e-4
    for i, j in (
        (0, 1),
        (0, 64),
        (63, 64),
        (0, 4095),
        (1, 65),
    ):  # the maximum of k independent ones is shifted by log k
        g = np.sort(np.maximum(noise[:, i], noise[:, j]) - np.log(2))
        assert kolmogorov_smirnov(g, np.exp(-np.exp(-g))) > 1e-4
    g = np.sort(noise.max(1) - np.log(4096))
    assert kolmogorov_smirnov(g, np.exp(-np.exp(-g))) > 1e-4


# ---- noise belongs to the token ----


def test_truncation_that_keeps_the_winner_does_not_change_it() -> None:
    whole = many(seed=3, step=0)
    for setting in ({"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.05}):
        kept = reference.support(LOGITS, **setting)
        tokens = many(seed=3, step=0, **setting)
        stays = np.isin(whole, kept)
        assert stays.any() and not stays.all()
        assert (tokens[stays] == whole[stays]).all() and np.isin(tokens, kept).all()


def test_the_vocabularys_size_does_not_matter() -> None:
    padded = np.full((500, 9000), -np.inf, np.float32)
    padded[:, :300] = LOGITS
    assert lanewise.sample(padded, seed=4, step=0).tolist() == many(seed=4, step=0)[:500].tolist()
    padded[:, 300:] = 50
    assert lanewise.sample(padded, seed=4, step=0, vocab_size=300).tolist() == many(seed=4, step=0)[:500].tolist()


def test_shards_merge_by_their_maximum() -> None:
    left, right = LOGITS.copy(), LOGITS.copy()
    left[150:] = right[:150] = -np.inf
    whole = many(seed=5, step=0)
    for key in range(200):
        both = {lanewise.sample(part, seed=5, step=0, keys=key) for part in (left, right)}
        assert whole[key] in both


def test_batch_order_and_isa_do_not_matter(isa: str) -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((40, 5000)) * 2).astype(np.float32)
    kw: dict[str, Any] = {
        "temperature": rng.uniform(0.5, 1.5, 40),
        "top_k": rng.integers(0, 100, 40),
        "top_p": rng.uniform(0.5, 1.1, 40),
        "min_p": rng.uniform(0, 0.1, 40),
        "keys": rng.integers(0, 2**62, 40),
        "step": rng.integers(0, 2**32, 40),
    }
    tokens = lanewise.sample(rows, seed=8, **kw)
    order = rng.permutation(40)
    assert (
        lanewise.sample(rows[order], seed=8, **{k: v[order] for k, v in kw.items()}).tolist() == tokens[order].tolist()
    )
    alone = [lanewise.sample(rows[i], seed=8, **{k: v[i] for k, v in kw.items()}) for i in range(40)]
    assert alone == tokens.tolist()
    with lanewise.using("scalar"):
        assert lanewise.sample(rows, seed=8, **kw).tolist() == tokens.tolist()


# ---- golden tokens ----

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_tokens.json").read_text())


def golden_rows() -> np.ndarray:
    """Three rows of 50,000 exact numbers in [-8, 8): hashed integers, so that no libm has a say."""
    i = np.arange(150000, dtype=np.uint64)
    return ((i * np.uint64(2654435761) % np.uint64(2**32)) / 2**28 - 8).astype(np.float32).reshape(3, -1)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["settings"])[:60])
def test_tokens_are_what_they_were(case: dict[str, Any], isa: str) -> None:
    """The file is the algorithm, version 1: to change a token in it is a major version."""
    assert GOLDEN["version"] == 1
    assert lanewise.sample(golden_rows(), **case["settings"]).tolist() == case["tokens"]


# ---- seeds ----


def test_stream_counts_its_steps() -> None:
    rng = Stream(42, step=5)
    first = [lanewise.sample(LOGITS, rng=rng) for _ in range(20)]
    assert rng.step == 25
    assert first == [lanewise.sample(LOGITS, seed=42, step=5 + i) for i in range(20)]
    spent = Stream(1, step=2**32)
    assert pickle.loads(pickle.dumps(spent)).step == 2**32
    with pytest.raises(ValueError, match="has used up its steps"):
        lanewise.sample(LOGITS, rng=spent)
    for twin in (pickle.loads(pickle.dumps(rng)), copy.deepcopy(rng)):
        assert (twin.seed, twin.step) == (42, 25)


def test_a_failed_call_uses_no_step_and_an_invalid_row_does() -> None:
    rng = Stream(1)
    with pytest.raises(ValueError, match="top_p"):
        lanewise.sample(LOGITS, top_p=np.nan, rng=rng)
    assert rng.step == 0
    with pytest.raises(InvalidLogitsError):
        lanewise.sample(np.full(3, np.nan, np.float32), rng=rng)
    assert rng.step == 1


def test_a_stream_is_for_one_thread_at_a_time() -> None:
    rng = Stream(1)
    errors = []

    def use() -> None:
        try:
            lanewise.sample(LOGITS, rng=rng)
        except RuntimeError as error:
            errors.append(str(error))

    with rng:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "another thread" in errors[0] and rng.step == 0


def test_threads_do_not_disturb_each_other() -> None:
    want = many(seed=6, step=0, top_p=0.9)[:400].tolist()
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        got[i] = lanewise.sample(np.broadcast_to(LOGITS, (400, 300)), seed=6, step=0, top_p=0.9).tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(got[i] == want for i in range(8))


# ---- parameters ----


def test_params_are_their_keywords() -> None:
    rows = np.stack([LOGITS, LOGITS])
    one = SamplingParams(temperature=0.7, top_k=9)
    other = SamplingParams(top_p=0.5, repetition_penalty=1.2)
    assert lanewise.sample(LOGITS, one, seed=1, step=0) == lanewise.sample(
        LOGITS, temperature=0.7, top_k=9, seed=1, step=0
    )
    got = lanewise.sample(rows, [one, other], output_ids=[[1], [2]], seed=1, step=0)
    want = lanewise.sample(
        rows,
        temperature=[0.7, 1],
        top_k=[9, 0],
        top_p=[1, 0.5],
        repetition_penalty=[1, 1.2],
        output_ids=[[1], [2]],
        seed=1,
        step=0,
    )
    assert got.tolist() == want.tolist()
    with pytest.raises(ValueError, match="top_k is given in params and as a keyword"):
        lanewise.sample(LOGITS, one, top_k=3)


def test_forms_of_history_agree() -> None:
    rows = np.stack([LOGITS, LOGITS])
    kw: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "seed": 1,
        "step": 0,
        "return_support": True,
    }

    def same(a: Any, b: Any) -> bool:
        return a[1].logprobs.tobytes() == b[1].logprobs.tobytes()

    want = lanewise.sample(rows, prompt_ids=[[1, 2], [3]], output_ids=[[4], []], **kw)
    padded = np.array([[1, 2], [3, -1]], np.int32)
    assert same(want, lanewise.sample(rows, prompt_ids=padded, output_ids=np.array([[4], [-1]]), **kw))
    assert same(want, lanewise.sample(rows, prompt_ids=(np.array([1, 2]), np.uint8([3])), output_ids=[[4], ()], **kw))
    alone = lanewise.sample(LOGITS, prompt_ids=[1, 2], output_ids=[4], **kw)
    for flat in (np.array([1, 2]), (1, 2), np.array([[1, 2]]), [[1, 2]]):
        assert same(alone, lanewise.sample(LOGITS, prompt_ids=flat, output_ids=[4], **kw))


def test_forms_of_bias_and_mask_agree() -> None:
    rows = np.stack([LOGITS, LOGITS])
    kw: dict[str, Any] = {"seed": 1, "step": 0, "return_support": True}
    dense = np.zeros((2, 300), np.float32)
    dense[0, 3], dense[1, 7] = 2.5, -np.inf
    allowed = np.arange(600).reshape(2, 300) % 5 > 0
    words = np.zeros((2, 320), bool)
    words[:, :300] = allowed
    packed = np.packbits(words, axis=1, bitorder="little").view(np.uint32)
    want = lanewise.sample(rows, bias=[{3: 2.5}, {7: -np.inf}], mask=allowed, **kw)
    for mask in (packed, packed.view(np.int32), np.asfortranarray(allowed)):
        got = lanewise.sample(rows, bias=dense, mask=mask, **kw)
        assert got[0].tolist() == want[0].tolist()
        assert got[1].ids.tolist() == want[1].ids.tolist()
    shared = lanewise.sample(rows, bias={3: 2.5}, mask=allowed[0], **kw)
    assert shared[1].ids[: shared[1].indptr[1]].tolist() == want[1].ids[: want[1].indptr[1]].tolist()


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, r"temperature must be in .* got -1"),
    ({"temperature": np.nan}, r"temperature .* got nan"),
    ({"temperature": [1.0, np.inf]}, r"temperature\[1\] .* got inf"),
    ({"temperature": [1.0]}, "temperature must be one value or one a row: 2 rows, got 1"),
    ({"top_p": np.nan}, "top_p must not be NaN"),
    ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
    ({"min_keep": -1}, "min_keep .* got -1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty .* got 0"),
    ({"frequency_penalty": np.inf}, "frequency_penalty .* got inf"),
    ({"seed": 1}, "seed needs step="),
    ({"step": 1}, "step needs seed"),
    ({"seed": -1, "step": 0}, "seed .* got -1"),
    ({"seed": 2**64, "step": 0}, f"seed .* got {2**64}"),
    ({"seed": 1, "step": 2**32}, f"step .* got {2**32}"),
    ({"seed": 1, "step": 0, "keys": [1, -2]}, r"keys\[1\] .* got -2"),
    ({"u": 1.0}, r"u must be in \[0, 1\), got 1"),
    ({"u": 0.5, "seed": 1, "step": 0}, "give one of seed, rng and u"),
    ({"vocab_size": 0}, "vocab_size .* got 0"),
    ({"vocab_size": 301}, r"vocab_size must be in \[1, 300\], got 301"),
    ({"ties": "first"}, "ties must be"),
    ({"preset": "vlm"}, "preset must be one of transformers"),
    ({"preset": ("top_k", "top_p")}, "preset must name 'temperature'"),
    ({"on_invalid": "ignore"}, "on_invalid must be"),
    ({"mask": np.ones((3, 300), bool)}, "mask must have shape"),
    ({"bias": {300: 1.0}}, r"bias\[0\]: id must be in \[0, 299\], got 300"),
    ({"bias": [{}, {1: np.nan}]}, r"bias\[1\]\[1\] .* got nan"),
    ({"bias": np.full(300, np.inf, np.float32)}, r"bias\[0\] is inf"),
    ({"bias": [{}]}, "bias must have one dict a row"),
    ({"params": [SamplingParams()]}, "params must be one or one a row: 2 rows, got 1"),
    ({"prompt_ids": [[1], [300]]}, r"prompt_ids\[1\]\[0\] is 300, not an id in 0..299"),
    ({"prompt_ids": [[1]]}, "prompt_ids must have one list a row"),
    ({"output_ids": np.array([[-2, 1], [1, 1]])}, r"output_ids\[0\]\[0\] is -2"),
]
TYPE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "warm"}, "temperature must be a number"),
    ({"top_k": 1.5}, "top_k must be an integer"),
    ({"mask": np.ones(300)}, "mask must be bool"),
    ({"prompt_ids": [[1.5], [2]]}, r"prompt_ids\[0\] must be integers"),
    ({"bias": np.ones(300, int)}, "bias must be"),
    ({"rng": 5}, "rng must be a lanewise.Stream"),
    ({"params": {"top_k": 3}}, "params must be"),
    ({"params": 3}, "params must be"),
    ({"preset": 5}, "preset must be a name or a list of steps, got 5"),
    ({"temperature": None}, "temperature must be a number or one a row, got None"),
    ({"bias": [{1: 2.0}, 2]}, r"bias\[1\] must be a dict or None, got 2"),
]


@pytest.mark.parametrize(("kw", "message"), ERRORS, ids=lambda v: str(v)[:40])
def test_errors_name_the_argument_the_row_and_the_value(kw: dict[str, Any], message: str) -> None:
    out = np.full(2, 77)
    with pytest.raises(ValueError, match=message):
        lanewise.sample(np.stack([LOGITS, LOGITS]), **kw, out=out)
    assert out.tolist() == [77, 77]


@pytest.mark.parametrize(("kw", "message"), TYPE_ERRORS, ids=lambda v: str(v)[:40])
def test_wrong_types_are_type_errors(kw: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        lanewise.sample(np.stack([LOGITS, LOGITS]), **kw)


def test_out_is_written_and_returned() -> None:
    rows = np.stack([LOGITS] * 4)
    for out in (np.empty(4, np.int64), np.empty(8, np.int64)[::2]):
        assert lanewise.sample(rows, seed=1, step=0, out=out) is out
        assert out.tolist() == lanewise.sample(rows, seed=1, step=0).tolist()
    with pytest.raises(TypeError, match="out must be int64"):
        lanewise.sample(rows, out=np.empty(4, np.int32))


def test_the_largest_vocabulary() -> None:
    row = np.zeros(1 << 20, np.float32)
    assert lanewise.sample(row, top_p=0.5, u=0.999999) == int(0.999999 * (1 << 19))
    assert 0 <= lanewise.sample(row, seed=1, step=0) < 1 << 20
    with pytest.raises(ValueError, match="sample takes up to 1048576 ids"):
        lanewise.sample(np.zeros((1 << 20) + 1, np.float32))


def test_the_callers_rounding_mode_has_no_say(isa: str) -> None:
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    upward = {"x86_64": 0x800, "aarch64": 0x400000}.get(_ops.MACHINE)
    if upward is None:
        pytest.skip("FE_UPWARD of this machine is not known here")
    wide = LOGITS.astype(np.float64) * np.pi

    def run() -> list[bytes]:
        _, support = lanewise.sample(
            wide, temperature=0.7, top_p=0.9, bias={3: 0.1}, seed=1, step=0, return_support=True
        )
        maps = (lanewise.softmax(wide), lanewise.log_softmax(LOGITS, temperature=0.3), lanewise.scale(wide, 0.7))
        return [support.ids.tobytes(), support.logprobs.tobytes(), *(a.tobytes() for a in maps)]

    want = run()
    assert libm.fesetround(upward) == 0
    try:
        got, mode = run(), libm.fegetround()
    finally:
        libm.fesetround(0)
    assert got == want and mode == upward

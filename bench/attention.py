"""The bars of attention, on one thread through `AttentionPlan.run`: beside the least that its work can cost, and torch.

The roof is the longer of two floors of the same turn: reading the same keys and values through the same table, and
multiplying and adding as often as the two products do, from registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

import lanewise
from lanewise import _ops, storage

from . import peers
from .bars import Row, line, markdown
from .kv import Turn, taken
from .report import View

HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK = 64
DTYPES = "f32", "bf16", "f16", "int8"
ROOF = {"f32": 72, "bf16": 60, "f16": 55, "int8": 42}  # percent
READ = {"f32": 2.4, "bf16": 5.5}  # 1.7 times less than vllm's, which were 4.1 and 9.3 times the read
LANES, CHAINS = 16, 7  # of the floor `multiply`


def placed(x: np.ndarray) -> np.ndarray:
    """Where lanewise's caches lie: on huge pages, if the system has them. torch's keys and values lie there too."""
    y = storage.allocate(x.nbytes, touch=True).view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


class Work:
    """One sequence of `keys` keys in shuffled blocks, the last `queries` of them asking."""

    def __init__(self, keys: int, dtype: str, heads: int = HEADS, queries: int = 1) -> None:
        rng = np.random.default_rng(0)
        blocks = -(-keys // BLOCK)
        self.table = rng.permutation(blocks)[None]
        shape = 2, blocks, KV_HEADS, BLOCK, DIM
        wide = rng.standard_normal(shape[1:], np.float32)
        self.wide = np.stack([wide, wide[:, ::-1]])
        self.scales: dict[str, np.ndarray] = {}
        if dtype == "int8":
            kv: np.ndarray = np.clip(np.round(self.wide * 40), -128, 127).astype(np.int8)
            scale = np.tile(np.float32([1 / 40, 0]), (*shape[1:4], 1))
            self.scales = {"k_scales": scale, "v_scales": scale}
        elif dtype == "bf16":
            import ml_dtypes

            kv = self.wide.astype(ml_dtypes.bfloat16)
        else:
            kv = self.wide.astype(np.float32 if dtype == "f32" else np.float16)
        self.kv = tuple(placed(kv))  # keys, values
        self.keys, self.heads, self.queries = keys, heads, queries
        self.q = rng.standard_normal((queries, heads, DIM), np.float32)
        self.out = np.empty_like(self.q)
        self.plan()

    def plan(self) -> None:
        """For the number of threads there is now."""
        self.planned = lanewise.AttentionPlan(
            self.table,
            [self.keys],
            num_heads=self.heads,
            num_kv_heads=KV_HEADS,
            block_size=BLOCK,
            query_start=[0, self.queries],
        )

    def run(self) -> None:
        self.planned.run(self.q, *self.kv, **self.scales, out=self.out)

    def products(self) -> int:
        """Multiplications that are added, of both products; causal."""
        seen = self.keys * self.queries - self.queries * (self.queries - 1) // 2
        return 2 * self.heads * DIM * seen


def clocked(call: Callable[[], object], inner: int) -> Turn:
    def turn(number: int) -> float:
        start = perf_counter_ns()
        for _ in range(inner):
            call()
        return (perf_counter_ns() - start) / inner

    return turn


def read(work: Work, inner: int) -> Turn:
    return lambda number: float(np.mean(work.planned._time_scan(*work.kv, inner)))


def multiply(work: Work, inner: int) -> Turn:
    """A share of the multiplications, and the time all of them would take."""
    times = work.products() // (LANES * CHAINS)
    x, out = np.arange(min(times, 20000), dtype=np.float32)[None], np.empty(1, np.float32)
    return lambda number: float(np.mean(_ops.run_rows("multiply", x, out, repeats=inner))) * times / x.size


def with_floors(work: Work, inner: int) -> dict[str, Turn]:
    return {"": clocked(work.run, inner), "read": read(work, inner), "multiply": multiply(work, inner)}


# ---- torch ----


def torch_forms(work: Work, dtype: str, inner: int) -> dict[str, Turn]:
    """The forms there are for grouped heads, keys and values of a head adjacent, as torch would have them."""
    import torch

    torch.set_num_threads(1)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    kv = torch.from_numpy(work.wide[:, work.table[0]].transpose(0, 2, 1, 3, 4).reshape(2, KV_HEADS, -1, DIM))
    shape = 2, 1, KV_HEADS, work.keys, DIM
    place = torch.from_numpy(placed(np.zeros(np.prod(shape) * kind.itemsize, np.uint8))).view(kind).view(shape)
    k, v = place.copy_(kv[:, None, :, : work.keys])
    q = torch.from_numpy(work.q).to(kind)
    group, queries = work.heads // KV_HEADS, work.queries
    folded = q.view(queries, KV_HEADS, group, DIM).permute(1, 2, 0, 3).reshape(1, KV_HEADS, group * queries, DIM)
    apart = q.transpose(0, 1)[None].contiguous()
    seen: Any = None
    if queries > 1:  # bottom-right: is_causal would be top-left
        seen = torch.arange(work.keys) <= torch.arange(work.keys - queries, work.keys)[:, None]
    seen_folded = None if seen is None else seen.repeat(group, 1)
    attention = torch.nn.functional.scaled_dot_product_attention

    def by_hand() -> Any:
        scores = torch.bmm(folded[0], k[0].transpose(1, 2)) * DIM**-0.5
        if seen is not None:
            scores = scores.masked_fill_(~seen_folded, float("-inf"))
        return torch.bmm(torch.softmax(scores, -1), v[0])

    forms = {
        "SDPA folded": lambda: attention(folded, k, v, attn_mask=seen_folded),
        "bmm": by_hand,
        "SDPA enable_gqa": lambda: attention(apart, k, v, attn_mask=seen, enable_gqa=True),
    }
    work.run()
    for name, form in forms.items():  # all do the same work
        out = form().float().reshape(work.heads, queries, DIM).transpose(0, 1).numpy()
        assert np.allclose(out, work.out, atol=1e-4 if dtype == "f32" else 3e-2), name
    return {name: clocked(form, inner) for name, form in forms.items()}


# ---- rows ----


def named(took: dict[str, np.ndarray]) -> str:
    return ", ".join(f"{name or 'lanewise'} {np.median(ns) / 1e3:.0f} us" for name, ns in took.items())


def times(took: dict[str, np.ndarray], of: str, to: str = "") -> float:
    return float(np.median(took[of] / took[to]))


def against_torch(what: str, keys: int, took: dict[str, np.ndarray], least: dict[str, float]) -> Iterator[Row]:
    """`best` is the form whose median is least."""
    forms = [name for name in took if name not in ("", "read", "multiply")]
    for name, limit in least.items():
        form = name if name != "best" else min(forms, key=lambda one: float(np.median(took[one])))
        label = f"torch, {name}" if name == form else f"torch, best: {form}"
        yield Row(f"{what} / {label}", keys, times(took, form), limit, "x as fast", named(took), at_least=True)


def decode(quick: bool) -> Iterator[Row]:
    has_torch = "torch" in peers.installed()
    for keys in (64, 256) if quick else (512, 4096, 16384):
        short, long = keys in (64, 512), keys in (256, 16384)
        inner, turns = (1, 2) if quick else (max(1, 16384 // keys // 2), 24)
        for dtype in DTYPES:
            work = Work(keys, dtype)
            against = has_torch and ((short and dtype in READ) or (long and dtype == "bf16"))
            ways = with_floors(work, inner) | (torch_forms(work, dtype, inner) if against else {})
            took = taken(ways, turns)
            what = f"decode, {dtype}"
            roof = np.maximum(took["read"], took["multiply"])
            share = 100 * float(np.median(roof / took[""]))
            note = f"{named(took)}; {'read' if times(took, 'read', 'multiply') > 1 else 'multiply'} is the roof"
            if not short:
                yield Row(what, keys, share, ROOF[dtype], "% of roof", note, at_least=True)
            elif dtype not in READ:
                yield Row(what, keys, share, 0, "% of roof", note, at_least=True)
            else:
                yield Row(what, keys, share, 0, "% of roof", note, at_least=True)
                yield Row(f"{what} / the read", keys, times(took, "", "read"), READ[dtype], "x the read", note)
            if against:
                least = {"best": 2.0} if short else {"SDPA folded": 1.5, "SDPA enable_gqa": 6.0}
                yield from against_torch(what, keys, took, least)


def by_two(work: Work) -> Turn:
    def turn(number: int) -> float:
        lanewise.set_num_threads(2)
        work.run()  # starts the second thread
        took = clocked(work.run, 1)(number)
        lanewise.set_num_threads(1)
        return took

    return turn


def two_threads(quick: bool) -> Iterator[Row]:
    keys = 256 if quick else 16384
    for dtype in ("f32", "bf16"):
        alone, shared = Work(keys, dtype), Work(keys, dtype)
        lanewise.set_num_threads(2)
        shared.plan()

        lanewise.set_num_threads(1)
        took = taken({"": by_two(shared), "one thread": clocked(alone.run, 1)}, 2 if quick else 24)
        faster = times(took, "one thread")
        yield Row(f"decode, {dtype}, two threads / one", keys, faster, 1.5, "x as fast", named(took), at_least=True)


def groups(quick: bool) -> Iterator[Row]:
    """Keys and values are as many bytes whatever the group."""
    keys = 256 if quick else 16384
    works = {group: Work(keys, "f32", KV_HEADS * group) for group in (4, 5, 7)}
    took = taken({f"group {group}": clocked(work.run, 1) for group, work in works.items()}, 2 if quick else 24)
    for group in (5, 7):
        over = times(took, f"group {group}", "group 4")
        yield Row(f"decode, f32, group {group} / 4", keys, over, 1.2, "x a byte", named(took))


def extend(quick: bool) -> Iterator[Row]:
    queries, keys = (8, 64) if quick else (512, 4096)
    work = Work(keys, "f32", queries=queries)
    ways = with_floors(work, 1) | (torch_forms(work, "f32", 1) if "torch" in peers.installed() else {})
    took = taken(ways, 2 if quick else 6)
    what = f"extend, f32, {queries} queries"
    share = 100 * float(np.median(np.maximum(took["read"], took["multiply"]) / took[""]))
    yield Row(what, keys, share, 0, "% of roof", named(took), at_least=True)
    yield from against_torch(what, keys, took, {"best": 1.0} if len(ways) > 3 else {})


def measured(quick: bool) -> Iterator[Row]:
    lanewise.set_num_threads(1)
    for part in (decode, two_threads, groups, extend):
        yield from partial(part, quick)()


VIEW = View("The bars of attention", "the bars of attention", Row, measured, "", line, markdown)

"""Rows of keys and values on their way: the bars of appending, and what conversions take.

`python -m bench.kv_transfer`. A step of decoding writes where nothing was written lately, so here rows miss the CPU's
caches: each turn has slots of its own in a KV-cache that is larger than they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from time import perf_counter_ns

import ml_dtypes
import numpy as np

import lanewise
from lanewise import PagedKVCache, _ops, append_kv

from .bars import Row, line
from .taking import Turn, over_loop, taken

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, DIM, BLOCK = 8, 128, 16


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 41) -> tuple[float, float, float]:
    """Median seconds of each, and the median of the ratios."""
    times = np.array([(seconds(ours), seconds(theirs)) for _ in range(repeats)])
    return float(np.median(times[:, 0])), float(np.median(times[:, 1])), float(np.median(times[:, 0] / times[:, 1]))


# ---- a token of each sequence ----


def row_numbers(cache: PagedKVCache, slots: np.ndarray) -> np.ndarray:
    """Where the loop has to write keys, then values: rows of the region, of a head or of all heads of a token."""
    g = cache.geometry
    keys, values = cache.keys(), cache.values()
    row = DIM * 2 * (1 if g.layout == "HND" else g.num_kv_heads)
    heads = np.arange(g.num_kv_heads if g.layout == "HND" else 1) * keys.strides[2]
    tokens = slots // BLOCK * keys.strides[1] + slots % BLOCK * keys.strides[3]
    layers = np.arange(g.num_layers) * keys.strides[0]
    at = (layers[:, None, None] + tokens[:, None] + heads).ravel()
    apart = values.ctypes.data - keys.ctypes.data
    numbers: np.ndarray = np.concatenate([at, at + apart]) // row
    return numbers


def appends(layout: str, batch: int, layers: int, turns: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    cache = PagedKVCache(layers, 3 * batch, HEADS, DIM, block_size=BLOCK, dtype=BF16, layout=layout, touch=True)
    both = rng.standard_normal((2, layers, batch, HEADS, DIM)).astype(BF16)
    seqs = [cache.sequence() for _ in range(batch)]
    lengths = np.arange(batch) % BLOCK
    cache.reserve(seqs, lengths)
    blocks = 3 * batch
    slots = [rng.permutation(blocks)[:batch] * BLOCK + rng.integers(0, BLOCK, batch) for _ in range(64)]
    width = DIM * (HEADS if layout == "NHD" else 1)
    rows, region = both.view(np.uint16).reshape(-1, width), cache._storage.region.view(np.uint16).reshape(-1, width)
    sources, targets = np.arange(len(rows)), [row_numbers(cache, each) for each in slots]

    def stateless(turn: int) -> float:
        start = perf_counter_ns()
        append_kv(both[0], both[1], cache.keys(), cache.values(), slots[turn % 64], layout="LNHTD")
        return perf_counter_ns() - start

    def paged(turn: int) -> float:
        if seqs[0].length > BLOCK:  # then each has taken a second block on the way
            for seq, length in zip(seqs, lengths, strict=True):
                seq.truncate(length)
        start = perf_counter_ns()
        cache.append(seqs, both[0], both[1])
        return perf_counter_ns() - start

    def copies(turn: int) -> float:
        return float(_ops.run_moves("copy_each", rows, region, sources, targets[turn % 64], 1)[0])

    ways: dict[str, Turn] = {"append_kv": stateless, "PagedKVCache.append": paged, "copy_each": copies}
    took = taken(ways, turns)
    for name in ("append_kv", "PagedKVCache.append"):
        over, note = over_loop({"": took[name], "copy_each": took["copy_each"]}, ("copy_each",))
        yield Row(f"{name}, a token each, {layout}", batch, over, 1.3, "x the loop", f"{layers} layers: {note}")


def rows(quick: bool) -> Iterator[Row]:
    for layout in ("NHD", "HND"):
        yield from appends(layout, 4, 2, 2) if quick else appends(layout, 32, 32, 60)


# ---- conversions ----


def convert(source: object, target: object, tokens: int = 8192, heads: int = 8, dim: int = 128, **rope: object) -> None:
    """16 MiB of float32 or less, beside memcpy of the bytes read: what memory allows is below that."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, heads, dim)).astype(np.float32).astype(source)
    cache, scales = np.zeros((tokens // 16, 16, heads, dim), target), None
    if target == np.int8:
        scales = np.zeros((tokens // 16, 16, heads, 2), np.float32)
    slots = np.arange(tokens)
    same = np.empty_like(x)
    if rope:
        table = rng.random((tokens, dim // 2)).astype(np.float32)
        rope |= {"cos": table, "sin": table, "positions": slots}
    ours, copy, _ = ratio(
        lambda: lanewise.append_kv(x, None, cache, None, slots, layout="NHD", k_scales=scales, **rope),
        lambda: np.copyto(same, x),
        15,
    )
    what = f"{np.dtype(source)} to {np.dtype(target)} {rope.get('rope', '')}"
    moved = x.nbytes + cache.nbytes
    print(f"{what}: {moved / ours / 1e9:.1f} GB/s read and written, copy {2 * x.nbytes / copy / 1e9:.1f}")
    if scales is not None and not rope:
        back = np.zeros_like(x)
        ours, _, _ = ratio(
            lambda: lanewise.gather_kv(cache, None, slots, layout="NHD", k_scales=scales, out=(back, None)),
            lambda: np.copyto(same, x),
            15,
        )
        print(f"  and back: {moved / ours / 1e9:.1f} GB/s")


def main() -> None:
    lanewise.set_num_threads(1)
    for row in rows(False):
        print(line(row))
    for source, target in (
        (np.float32, BF16),
        (np.float32, np.float16),
        (BF16, np.float32),
        (np.float16, np.int8),
        (BF16, np.int8),
        (np.float32, np.int8),
        (BF16, BF16),
    ):
        convert(source, target)
    for rope in ("neox", "interleaved"):
        convert(BF16, BF16, rope=rope)


if __name__ == "__main__":
    main()

"""Rows of keys and values on their way, beside plain C loops over the same slots: `python -m bench.kv_transfer`.

One thread; ours and the loop in turns, medians of the ratios.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

import lanewise

BF16 = np.dtype(ml_dtypes.bfloat16)
LOOP = """
#include <stdint.h>
#include <string.h>
/* rows of each layer and head, scattered: what append has to do at least */
void append(char *to, const char *from, const int64_t *slots, int64_t layers, int64_t n, int64_t heads, int64_t row,
            int64_t tokens, int64_t layer, int64_t block, int64_t head, int64_t token) {
  for (int64_t l = 0; l < layers; l++)
    for (int64_t i = 0; i < n; i++)
      for (int64_t h = 0; h < heads; h++)
        memcpy(to + l * layer + slots[i] / tokens * block + h * head + slots[i] % tokens * token,
               from + ((l * n + i) * heads + h) * row, row);
}
"""


def loop() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(LOOP)
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 41) -> tuple[float, float, float]:
    """Median seconds of each, and the median of the ratios."""
    times = np.array([(seconds(ours), seconds(theirs)) for _ in range(repeats)])
    return float(np.median(times[:, 0])), float(np.median(times[:, 1])), float(np.median(times[:, 0] / times[:, 1]))


def append(layout: str, batch: int = 32, layers: int = 32, heads: int = 8, dim: int = 128, blocks: int = 512) -> None:
    """A token of each sequence, each at another place of another block."""
    rng = np.random.default_rng(0)
    shape = (layers, 2, blocks, 16, heads, dim) if layout == "NHD" else (layers, 2, blocks, heads, 16, dim)
    cache = np.zeros(shape, BF16)
    k, v = (rng.standard_normal((layers, batch, heads, dim)).astype(BF16) for _ in range(2))
    slots = rng.permutation(blocks)[:batch] * 16 + rng.integers(0, 16, batch)
    c, stride = loop(), dict(zip("L2N", cache.strides[:3], strict=True))
    head, token = (cache.strides[4], cache.strides[3]) if layout == "NHD" else cache.strides[3:5]

    def theirs() -> None:
        for x, half in ((k, 0), (v, 1)):
            run = (1, heads * dim * 2) if layout == "NHD" else (heads, dim * 2)  # the heads of a token are one row
            sizes = (layers, batch, *run, 16, stride["L"], stride["N"], head, token)
            to = cache.ctypes.data + half * stride["2"]
            c.append(*map(ctypes.c_void_p, (to, x.ctypes.data, slots.ctypes.data)), *map(ctypes.c_int64, sizes))

    axes = "L2NTHD" if layout == "NHD" else "L2NHTD"
    ours, loops, times = ratio(lambda: lanewise.append_kv(k, v, cache, None, slots, layout=axes), theirs)
    print(f"append a token, {layout}, B {batch}: {ours * 1e6:.0f} us, C loop {loops * 1e6:.0f} us, {times:.2f} x (1.3)")


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
    for layout in ("NHD", "HND"):
        append(layout)
        append(layout, 1)
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

"""scipy.special's softmax and logsumexp, and lanewise's in their place, timed side by side."""

from timeit import repeat
from typing import Any

import numpy as np
from scipy import special

import lanewise.compat.scipy as ours

x = np.random.default_rng(0).normal(0, 3, (8, 32_000)).astype(np.float32)


def microseconds(module: Any, name: str) -> float:
    return min(repeat(lambda: getattr(module, name)(x, axis=1), number=3)) / 3 * 1e6


for name in ("softmax", "log_softmax", "logsumexp"):
    off = np.abs(getattr(ours, name)(x, axis=1) - getattr(special, name)(x, axis=1)).max()
    print(
        f"{name:12}{microseconds(ours, name):6.0f} us, SciPy's {microseconds(special, name):6.0f} us, apart {off:.1e}"
    )

print("over two axes:", ours.softmax(x.reshape(8, 160, 200), axis=(1, 2)).sum(axis=(1, 2)).round(3))
print("weights:", ours.logsumexp(x, axis=1, b=np.float32(0.5)).round(3)[:3])
print("float64 is SciPy's:", ours.softmax(x.astype(float), axis=1).dtype)

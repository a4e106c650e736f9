"""The tests of laws: chi-square and Kolmogorov-Smirnov, as p-values."""

from __future__ import annotations

import math

import numpy as np


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of counts against a law; cells expected below 5 are pooled. Wilson & Hilferty 1931 for the tail."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0, "drawn with probability 0"
    large = expected >= 5
    seen, due = [counts[large]], [expected[large]]
    if expected[~large].sum() > 0:
        seen.append(np.array([counts[~large].sum()]))
        due.append(np.array([expected[~large].sum()]))
    seen_all, due_all = np.concatenate(seen), np.concatenate(due)
    degrees = len(due_all) - 1
    statistic = ((seen_all - due_all) ** 2 / due_all).sum()
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def kolmogorov_smirnov(samples: np.ndarray, cdf: np.ndarray) -> float:
    """p-value of samples whose law has the given values at the sorted samples (asymptotic series)."""
    n = len(samples)
    steps = np.arange(n + 1) / n
    d = max((steps[1:] - cdf).max(), (cdf - steps[:-1]).max())
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101)))

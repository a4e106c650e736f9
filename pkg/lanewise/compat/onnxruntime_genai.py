"""The loop of onnxruntime-genai, with lanewise as its sampler.

>>> while not generator.is_done():
...     lanewise.compat.onnxruntime_genai.generate_next_token(generator, temperature=0.7, top_p=0.9, rng=rng)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import lanewise
from lanewise.compat import _host

_host.need("onnxruntime_genai", package="onnxruntime-genai", works="0.18", names=("Generator",))

_PENALTIES = {"repetition_penalty", "frequency_penalty", "presence_penalty"}
_NOT_HERE = {"return_support", "on_invalid", "out"}


def generate_next_token(generator: Any, params: Any = None, **settings: Any) -> NDArray[np.int64]:
    """`generator.generate_next_token()`, the tokens drawn by `lanewise.sample`. Returns them.

    settings: its keywords, but for those of the result. Penalties look at the whole sequences, unless `prompt_ids` or
    `output_ids` are given. The end of a sequence, padding and the maximal length stay the generator's to watch.
    """
    if unknown := sorted(_NOT_HERE & settings.keys()):
        raise TypeError(f"generate_next_token takes no {unknown[0]}")
    logits = generator.get_logits()[:, -1]  # a copy, so it is ours to write to
    wants_ids = params is not None or _PENALTIES & settings.keys()
    if wants_ids and not {"prompt_ids", "output_ids"} & settings.keys():  # of beams, genai has no sequences to give
        settings["output_ids"] = [generator.get_sequence(row) for row in range(len(logits))]
    tokens: NDArray[np.int64] = lanewise.sample(logits, params, **settings)
    logits.fill(-np.inf)
    logits[np.arange(len(tokens)), tokens] = 0.0
    generator.set_logits(logits)  # nothing else is left for it to choose
    generator.generate_next_token()
    return tokens

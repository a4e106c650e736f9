"""llama.cpp's own samplers, by ctypes: what they do to a row."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np


class Chain:
    """Steps such as `("top_k", 40)`, which are llama_sampler_init_top_k(40), in that order."""

    def __init__(self, *steps: tuple[Any, ...]) -> None:
        self.chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for name, *numbers in steps:
            llama_cpp.llama_sampler_chain_add(self.chain, getattr(llama_cpp, f"llama_sampler_init_{name}")(*numbers))

    def accept(self, *tokens: int) -> Chain:
        for token in tokens:
            llama_cpp.llama_sampler_accept(self.chain, token)
        return self

    def apply(self, row: np.ndarray) -> tuple[np.ndarray, int]:
        """The candidates left, with the fields id, logit and p, and the index of the one chosen, or -1."""
        candidates = np.zeros(len(row), [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        candidates["id"] = np.arange(len(row))
        candidates["logit"] = row
        data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(data, len(row), -1, False)
        llama_cpp.llama_sampler_apply(self.chain, ctypes.byref(array))
        first = (ctypes.addressof(array.data.contents) - candidates.ctypes.data) // candidates.itemsize
        return candidates[first : first + array.size], array.selected  # xtc moves the beginning

    def __del__(self) -> None:
        llama_cpp.llama_sampler_free(self.chain)

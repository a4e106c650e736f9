"""`from lanewise.compat.llama_cpp import Llama`: llama-cpp-python's, choosing its tokens by lanewise.

>>> llama = Llama("model.gguf")
>>> llama.create_completion("Once upon a time", temperature=0.7, top_p=0.9, seed=1)

`logits` and `sample` are for loops of one's own, `processor` and `drawing` for the `logits_processor` of any `Llama`.
Every other name is llama_cpp's own.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lanewise
from lanewise.compat import _host

_VERSIONS = {"package": "llama-cpp-python", "works": "0.3.36"}
_llama_cpp = _host.need("llama_cpp", **_VERSIONS, names=("Llama", "llama_get_logits_ith"))
_host.need("llama_cpp._internals", **_VERSIONS, names=("LlamaSampler",))  # since Llama samples by it, as here

_Llama: Any = _llama_cpp.Llama

_NUMBERS = ("temp", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
_RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's word for no seed

_Processor = Callable[[NDArray[np.intc], NDArray[np.single]], NDArray[np.single]]


def __getattr__(name: str) -> Any:
    return getattr(_llama_cpp, name)


class Llama(_Llama):
    """llama_cpp.Llama, with its parameters and methods. What lanewise has no kernel for stays llama.cpp's."""

    def _init_sampler(self, *args: Any, **settings: Any) -> Any:
        bound = signature(_Llama._init_sampler).bind(self, *args, **settings)
        bound.apply_defaults()
        wanted = bound.arguments
        return Sampler(self, wanted) if _is_ours(wanted) else super()._init_sampler(*args, **settings)


class Sampler:
    """What `Llama` asks for a token: its settings, and the ids it has drawn."""

    def __init__(self, llama: Any, wanted: dict[str, Any]) -> None:
        self._processors = wanted["logits_processor"] or ()
        self._llama = llama if self._processors else None  # which holds this one: a cycle would keep the model
        self._n_vocab = llama.n_vocab()
        self._drawn: deque[int] = deque(maxlen=max(llama.last_n_tokens_size, 0))
        self._seed = llama._seed
        self._settings = _settings(wanted)
        self.reset()

    def sample(self, ctx: Any, idx: int = -1) -> int:
        scores = _view(ctx.ctx, self._n_vocab, idx)
        if self._llama is not None:
            scores = scores.copy()  # they may write to it
            for process in self._processors:
                scores[:] = process(self._llama._input_ids, scores)
        token: int = lanewise.sample(
            scores, output_ids=list(self._drawn), rng=self._rng, preset="llama.cpp", **self._settings
        )
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        self._drawn.append(token)

    def reset(self) -> None:
        """As if nothing had been drawn."""
        self._drawn.clear()
        self._rng = _stream(self._seed)


def logits(llama: Any, idx: int = -1) -> NDArray[np.float32]:
    """The logits after the last token that `llama` has evaluated, in llama.cpp's own memory: valid, and what is
    written to it counts, until it evaluates again or is closed. idx: as in llama_get_logits_ith. Raises IndexError."""
    return _view(llama.ctx, llama.n_vocab(), idx, owner=llama)


def sample(llama: Any, params: Any = None, *, idx: int = -1, **settings: Any) -> Any:
    """`lanewise.sample` of these logits, with all its parameters, in llama.cpp's order unless `preset` says another."""
    return lanewise.sample(logits(llama, idx), params, **{"preset": "llama.cpp", **settings})


def processor(function: Callable[..., Any], /, *args: Any, **settings: Any) -> _Processor:
    """A logits processor that gives `function(scores, *args, **settings)`.

    >>> LogitsProcessorList([processor(lanewise.min_p_mask, 0.05), processor(lanewise.apply_bias, {7: -2.0})])
    """
    return lambda input_ids, scores: function(scores, *args, **settings)


def drawing(params: Any = None, *, last_n: int = 64, **settings: Any) -> _Processor:
    """A logits processor that draws a token by `lanewise.sample` and leaves no other: for any `Llama`.

    Penalties look at the last `last_n` ids, of the prompt too; below 0, at all. The rest as in `sample`.
    """

    def draw(input_ids: NDArray[np.intc], scores: NDArray[np.single]) -> NDArray[np.single]:
        seen = input_ids if last_n < 0 else input_ids[max(len(input_ids) - last_n, 0) :]
        token = lanewise.sample(scores, params, **{"preset": "llama.cpp", "output_ids": seen, **settings})
        only = np.full(len(scores), -np.inf, np.single)
        only[token] = 0.0
        return only

    return draw


def _view(ctx: Any, n_vocab: int, idx: int, owner: Any = None) -> NDArray[np.float32]:
    pointer = _llama_cpp.llama_get_logits_ith(ctx, idx)
    if not pointer:
        raise IndexError(f"llama.cpp has no logits at {idx}")
    pointer.owner = owner  # the view keeps the pointer, and so the memory
    view: NDArray[np.float32] = np.ctypeslib.as_array(pointer, (n_vocab,))
    return view


def _is_ours(wanted: dict[str, Any]) -> bool:
    mirostat = wanted["temp"] > 0 and wanted["mirostat_mode"] in (1, 2)
    typical = wanted["temp"] > 0 and wanted["typical_p"] < 1
    finite = all(np.isfinite(wanted[name]) for name in _NUMBERS)
    return wanted["grammar"] is None and not mirostat and not typical and finite and wanted["repeat_penalty"] > 0


def _settings(wanted: dict[str, Any]) -> dict[str, Any]:
    """The parameters of lanewise.sample. Below 0, temp means no truncation, at temperature 1."""
    penalties = {
        "repetition_penalty": wanted["repeat_penalty"],
        "frequency_penalty": wanted["frequency_penalty"],
        "presence_penalty": wanted["presence_penalty"],
    }
    if wanted["temp"] <= 0:
        return {"temperature": float(wanted["temp"] < 0), **penalties}
    return {
        "temperature": wanted["temp"],
        "top_k": 1 if wanted["min_p"] > 1 else wanted["top_k"],  # nothing is so probable but the first
        "top_p": wanted["top_p"],
        "min_p": min(max(wanted["min_p"], 0.0), 1.0),
        **penalties,
    }


def _stream(seed: int) -> lanewise.Stream:
    wrapped = seed & 0xFFFFFFFF  # a C integer of 32 bits, there
    return lanewise.Stream(secrets.randbits(64) if wrapped == _RANDOM_SEED else wrapped)

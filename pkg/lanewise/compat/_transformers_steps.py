"""transformers' processors as steps of a Sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lanewise import steps
from lanewise.compat._host import need
from lanewise.compat._tensors import torch

host: Any = need("transformers", package="transformers", works="5.0 to 5.24", names=("LogitsProcessorList",))


def _ids(tensor: Any) -> tuple[int, ...]:
    return tuple(torch.as_tensor(tensor).reshape(-1).tolist())


def _penalty(p: Any) -> steps.Step | None:
    return steps.Penalties(p.penalty) if getattr(p, "prompt_ignore_length", None) is None else None


def _encoder(p: Any) -> steps.Step | None:
    ids = p.encoder_input_ids
    return steps.EncoderRepetition(1 / p.penalty, _ids(ids)) if len(ids) == 1 else None


# Lengths are those of the whole text, as transformers counts them.
_STEPS: dict[str, Callable[[Any], steps.Step | None]] = {
    "SequenceBiasLogitsProcessor": lambda p: steps.SequenceBias(p.sequence_bias),
    "NoBadWordsLogitsProcessor": lambda p: steps.SequenceBias(p.sequence_bias),
    "RepetitionPenaltyLogitsProcessor": _penalty,
    "EncoderRepetitionPenaltyLogitsProcessor": _encoder,
    "NoRepeatNGramLogitsProcessor": lambda p: steps.NoRepeatNgram(p.ngram_size),
    "MinLengthLogitsProcessor": lambda p: steps.MinTokens(p.min_length, _ids(p.eos_token_id), "both"),
    "MinNewTokensLengthLogitsProcessor": lambda p: steps.MinTokens(
        p.prompt_length_to_skip + p.min_new_tokens, _ids(p.eos_token_id), "both"
    ),
    "ForcedBOSTokenLogitsProcessor": lambda p: steps.ForcedBOS(p.bos_token_id),
    "ForcedEOSTokenLogitsProcessor": lambda p: steps.ForcedEOS(p.max_length, _ids(p.eos_token_id)),
    "ExponentialDecayLengthPenalty": lambda p: steps.LengthDecay(
        p.regulation_start, p.regulation_factor, _ids(p.eos_token_id), "both"
    ),
    "SuppressTokensLogitsProcessor": lambda p: steps.Suppress(_ids(p.suppress_tokens)),
    "SuppressTokensAtBeginLogitsProcessor": lambda p: steps.SuppressAtBegin(
        _ids(p.begin_suppress_tokens), p.begin_index, "both"
    ),
    "TemperatureLogitsWarper": lambda p: steps.Temperature(p.temperature),
    "TopHLogitsWarper": lambda p: steps.TopH(p.top_h),
    "TopKLogitsWarper": lambda p: steps.TopK(p.top_k, ties="all"),
    "TopPLogitsWarper": lambda p: steps.TopP(p.top_p, p.min_tokens_to_keep) if p.top_p < 1 else None,
    "MinPLogitsWarper": lambda p: steps.MinP(p.min_p, p.min_tokens_to_keep),
    "TypicalLogitsWarper": lambda p: steps.Typical(p.mass, p.min_tokens_to_keep),
    "EpsilonLogitsWarper": lambda p: steps.Epsilon(p.epsilon, p.min_tokens_to_keep),
    "EtaLogitsWarper": lambda p: steps.Eta(float(p.epsilon), p.min_tokens_to_keep),
    "LogitNormalization": lambda p: steps.Renormalise(),
}


class _Processor:
    """A processor of one sequence, for steps.Custom."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, ids: NDArray[np.int64], row: NDArray[np.float32]) -> Any:
        return self.processor(torch.from_numpy(ids)[None], torch.from_numpy(row)[None])[0].numpy()


def steps_of(processors: Sequence[Any]) -> tuple[steps.Step, ...]:
    """The steps that say the same as transformers' processors of one sequence; one that has none is called as it is."""
    found: list[steps.Step] = []
    for processor in processors:
        kind = type(processor)
        known = kind.__module__.startswith(("transformers.", "lanewise.")) and _STEPS.get(kind.__name__)
        plain = getattr(processor, "filter_value", -math.inf) == -math.inf
        step = known(processor) if known and plain else None
        found.append(step or steps.Custom(_Processor(processor)))
    return tuple(found)

"""transformers' logits processors, and its generate() with one call for the whole sampling step (docs/compat.md).

Every class here is a subclass that takes what transformers' takes. What lanewise cannot do alike (other devices, three
axes, rows with a NaN, ...) is left to the class above, so it is done as before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lanewise
from lanewise.compat._host import need
from lanewise.compat._tensors import entropy, torch
from lanewise.compat._transformers_attention import register as register_attention
from lanewise.compat._transformers_cache import PagedCache
from lanewise.compat._transformers_steps import steps_of

WORKS = "5.0 to 5.24"
host: Any = need(
    "transformers",
    package="transformers",
    works=WORKS,
    names=("GenerationMixin", "LogitsProcessorList", "MinPLogitsWarper"),
)

register_attention()

__all__ = [
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "MinPLogitsWarper",
    "PagedCache",
    "RepetitionPenaltyLogitsProcessor",
    "Sampler",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "installed",
    "steps_of",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_IDS = 1 << 20


def takes(scores: Any) -> bool:
    """Whether lanewise takes them as rows of logits."""
    return (
        scores.dim() == 2
        and scores.dtype in DTYPES
        and scores.device.type == "cpu"
        and not scores.requires_grad
        and scores.shape[0] > 0
        and 0 < scores.shape[1] <= MOST_IDS
    )


def is_moderate(number: float) -> bool:
    """Whether float32 arithmetic with it stays clear of zero and infinity."""
    return 1e-30 <= number <= 1e30


# ---- processors ----


class Truncation:
    """One of transformers' truncations, done by lanewise if it can."""

    filter_value: float
    min_tokens_to_keep: int

    def mask(self, scores: Any, out: NDArray[np.float32]) -> None:
        """Write the scores kept, and -inf for the rest."""
        raise NotImplementedError

    def can(self) -> bool:
        return True

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if takes(scores) and self.filter_value == -math.inf and self.can():
            out = torch.empty(scores.shape, dtype=torch.float32, device="cpu")
            with contextlib.suppress(lanewise.InvalidLogitsError):  # a NaN has a way of its own through the comparisons
                self.mask(scores, out.numpy())
                return out.to(scores.dtype)
        return super().__call__(input_ids, scores)  # type: ignore[misc]


class TopKLogitsWarper(Truncation, host.TopKLogitsWarper):
    top_k: int

    def mask(self, scores: Any, out: NDArray[np.float32]) -> None:
        lanewise.top_k_mask(scores, min(self.top_k, MOST_IDS), ties="all", out=out)


class TopPLogitsWarper(Truncation, host.TopPLogitsWarper):
    top_p: float

    def can(self) -> bool:
        return self.top_p < 1.0  # at 1, transformers drops what its cumulated sum rounds to 0

    def mask(self, scores: Any, out: NDArray[np.float32]) -> None:
        lanewise.top_p_mask(scores, self.top_p, min_keep=self.min_tokens_to_keep, out=out)


class MinPLogitsWarper(Truncation, host.MinPLogitsWarper):
    min_p: float

    def mask(self, scores: Any, out: NDArray[np.float32]) -> None:
        lanewise.min_p_mask(scores, float(self.min_p), min_keep=self.min_tokens_to_keep, out=out)


class LeastProbability(Truncation):
    """A truncation by a probability: a min-p that differs from row to row."""

    def least(self, found: lanewise.Logprobs) -> Any:
        raise NotImplementedError

    def mask(self, scores: Any, out: NDArray[np.float32]) -> None:
        found = lanewise.logprobs(scores, top_n=1, entropy=True)
        assert found.top_logprobs is not None
        share = self.least(found) / np.exp(found.top_logprobs[:, 0].astype(np.float64))
        lanewise.min_p_mask(scores, np.fmin(share, 1.0), out=out)
        if self.min_tokens_to_keep > 1:  # with their ties, which min_keep has not
            np.maximum(out, lanewise.top_k_mask(scores, self.min_tokens_to_keep, ties="all"), out=out)


class EpsilonLogitsWarper(LeastProbability, host.EpsilonLogitsWarper):
    epsilon: float

    def least(self, found: lanewise.Logprobs) -> Any:
        return self.epsilon


class EtaLogitsWarper(LeastProbability, host.EtaLogitsWarper):
    epsilon: Any

    def least(self, found: lanewise.Logprobs) -> Any:
        epsilon = float(self.epsilon)
        return np.fmin(epsilon, math.sqrt(epsilon) * np.exp(-np.float64(found.entropy)))


class RepetitionPenaltyLogitsProcessor(host.RepetitionPenaltyLogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        ids = penalised(self, input_ids, scores) if takes(scores) else None
        if ids is None:
            return super().__call__(input_ids, scores)
        out = lanewise.apply_penalties(scores, repetition_penalty=self.penalty, prompt_ids=ids)
        return torch.from_numpy(out).to(scores.dtype)


TemperatureLogitsWarper = host.TemperatureLogitsWarper  # a division: torch's is as fast as memory


PENALTIES = (RepetitionPenaltyLogitsProcessor, host.RepetitionPenaltyLogitsProcessor)


def penalised(processor: Any, input_ids: Any, scores: Any) -> NDArray[np.int64] | None:
    """The ids that a repetition penalty touches, -1 for the others; None if lanewise cannot do alike."""
    ignored = processor.prompt_ignore_length
    if input_ids.dtype != torch.int64 or input_ids.dim() != 2 or input_ids.shape[0] != scores.shape[0]:
        return None
    ids = input_ids.numpy()
    if (ids < 0).any() or not is_moderate(processor.penalty):
        return None
    if isinstance(ignored, torch.Tensor):
        if ignored.shape[0] != ids.shape[0]:
            return None
        ids = np.where(np.arange(ids.shape[1]) < ignored.cpu().numpy()[:, None], -1, ids)
    elif ignored is not None:
        ids = ids[:, ignored:]
    vocab = scores.shape[1]  # may be less than the embedding's
    return np.where(ids < vocab, ids, -1) if (ids >= vocab).any() else ids


# ---- the whole step ----


def setting(processor: Any) -> dict[str, float] | None:
    """What sample is to be told instead of calling it; None if nothing says the same."""
    kind = type(processor)
    if kind is host.LogitNormalization:
        return {}  # a constant for each row, which no draw sees
    if kind is TemperatureLogitsWarper:
        return {"temperature": processor.temperature} if is_moderate(processor.temperature) else None
    if getattr(processor, "filter_value", 0) != -math.inf:
        return None
    if kind in (TopKLogitsWarper, host.TopKLogitsWarper):
        return {"top_k": min(processor.top_k, MOST_IDS)}
    if processor.min_tokens_to_keep != 1:
        return None  # would be top-k's as well
    if kind in (TopPLogitsWarper, host.TopPLogitsWarper):
        return {"top_p": processor.top_p} if processor.top_p < 1.0 else None
    if kind in (MinPLogitsWarper, host.MinPLogitsWarper):
        return {"min_p": float(processor.min_p)}
    return None


def steps_at_the_end(processors: Sequence[Any]) -> tuple[int, dict[str, float]]:
    """Where those begin that one call of sample can stand for, and what it is told, last step first."""
    told: dict[str, float] = {}
    for i in reversed(range(len(processors))):
        more = setting(processors[i])
        if more is None or more.keys() & told.keys():
            return i + 1, told
        told |= more
    return 0, told


class Sampler:
    """Processors, softmax and torch.multinomial in one call: tokens = sampler(input_ids, scores).

    The temperature and truncations that end the list, and a repetition penalty right before them, become arguments of
    `lanewise.sample`; what stands before runs first, as it is. The seed is drawn from `generator`, a torch.Generator,
    else from torch's own; every call is a step, every row a key.
    """

    def __init__(self, processors: Sequence[Any], generator: Any = None, *, fuse: bool = True) -> None:
        first, told = steps_at_the_end(processors) if fuse else (len(processors), {})
        steps = [*reversed(told)]
        self.penalty = None
        if fuse and first and type(processors[first - 1]) in PENALTIES:
            first -= 1
            self.penalty = processors[first]
        self.before = host.LogitsProcessorList(processors[:first])
        self.fused = host.LogitsProcessorList(processors[first:])
        self.told: dict[str, Any] = {
            **told,
            "preset": steps if "temperature" in told else ["temperature", *steps],
            "ties": "top_k",
        }
        self.generator = generator
        self.seed = int(entropy((), generator))
        self.step = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return self.draw(input_ids, self.before(input_ids, scores))

    def draw(self, input_ids: Any, scores: Any) -> Any:
        """The tokens, of scores that what stands before has processed."""
        step, self.step = self.step, self.step + 1
        penalty = self.penalties(input_ids, scores) if takes(scores) else None
        if penalty is not None:
            tokens = torch.empty(scores.shape[0], dtype=torch.int64, device="cpu")
            with contextlib.suppress(lanewise.InvalidLogitsError):  # for torch.multinomial to raise what it raises
                lanewise.sample(scores, **self.told, **penalty, seed=self.seed, step=step, out=tokens.numpy())
                return tokens
        probs = torch.softmax(self.fused(input_ids, scores), dim=-1)
        return torch.multinomial(probs, num_samples=1, generator=self.generator).squeeze(1)

    def penalties(self, input_ids: Any, scores: Any) -> dict[str, Any] | None:
        if self.penalty is None:
            return {}
        ids = penalised(self.penalty, input_ids, scores)
        return None if ids is None else {"repetition_penalty": self.penalty.penalty, "prompt_ids": ids}


class Drawn(torch.Tensor):
    """Scores that answer the first argmax with the tokens drawn from them, and are plain scores from then on."""

    tokens: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.argmax, torch.Tensor.argmax):
            raise RuntimeError(
                f"transformers {host.__version__} asks the scores for {func.__name__}, not argmax: use {WORKS}"
            )
        scores = args[0]
        scores.__class__ = torch.Tensor
        return scores.__dict__.pop("tokens")


class DrawingProcessor(host.LogitsProcessor):
    """All processors of a generate() and its draw."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = self.sampler.before(input_ids, scores)
        drawn = scores.as_subclass(Drawn)
        drawn.tokens = self.sampler.draw(input_ids, scores)
        return drawn


blocks: dict[object, Any] = {}  # the generators of the installed() blocks that are open, the latest last
replaced: Any = None  # GenerationMixin._sample, while one is open
blocks_lock = threading.Lock()


@contextlib.contextmanager
def installed(seed: int | None = None) -> Iterator[None]:
    """Within it, generate() draws its tokens with lanewise, in one call a step.

    It holds for the whole process. Each generate() takes a seed from torch's generator, so torch.manual_seed decides as
    before; `seed` gives those within a generator of their own. Of blocks that overlap, the latest that is open decides.
    """
    global replaced
    block, mixin = object(), host.GenerationMixin
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with blocks_lock:
        if not blocks:
            replaced, mixin._sample = mixin._sample, drawing_before(mixin._sample)
        blocks[block] = generator
    try:
        yield
    finally:
        with blocks_lock:  # blocks of several threads end in any order
            del blocks[block]
            if not blocks:
                mixin._sample = replaced


def drawing_before(sample: Any) -> Any:
    """GenerationMixin._sample, told to take the argmax of scores that answer it with the tokens drawn."""

    @functools.wraps(sample)
    def drawing(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **more: Any
    ) -> Any:
        if generation_config.do_sample and input_ids.device.type == "cpu":
            scores_wanted = generation_config.return_dict_in_generate and generation_config.output_scores
            *_, generator = None, *blocks.values()
            sampler = Sampler(logits_processor, generator, fuse=not scores_wanted)
            logits_processor = host.LogitsProcessorList([DrawingProcessor(sampler)])
            generation_config = copy.copy(generation_config)
            generation_config.do_sample = False  # what generate() takes is the argmax: see Drawn
        return sample(model, input_ids, logits_processor, stopping_criteria, generation_config, **more)

    return drawing

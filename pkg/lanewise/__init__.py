"""From logits to token on a CPU: the same inputs and seed give the same token, bit for bit, on every CPU."""

import importlib
from typing import TYPE_CHECKING, Any

from ._dispatch import info, use, using
from ._threads import get_num_threads, set_num_threads
from ._tune import tune
from .attention import AttentionPlan, decode_attention, extend_attention, merge_state, merge_states, softmax_stats
from .attention_steps import attention_step, prefix_cut
from .decoding import BeamStep, Verified, beam_step, verify_draft
from .drawing import sample_from_probs, sample_n, verify
from .errors import BlockError, DamagedSaveError, InvalidLogitsError, OutOfBlocksError
from .filters import (
    apply_bias,
    apply_penalties,
    apply_token_bitmask,
    min_p_mask,
    top_k_mask,
    top_k_renorm,
    top_p_mask,
    top_p_renorm,
)
from .moves import (
    copy_blocks,
    gather_blocks,
    get_stream_threshold,
    permute_blocks,
    scatter_blocks,
    set_stream_threshold,
    swap_blocks,
    zero_blocks,
)
from .params import SamplingParams
from .pool import BlockPool, PrefixCache
from .sampling import Support, argmax, sample, top_k
from .scoring import Logprobs, logprobs
from .state import SampleState
from .stream import Stream
from .transfer import append_kv, gather_kv, relayout
from .values import log_softmax, logsumexp, scale, softmax

if TYPE_CHECKING:
    from . import steps
    from .beams import BeamMove, BeamSearch, Hypothesis
    from .kvcache import PagedKVCache
    from .offload import HostOffload, Transfer
    from .sampler import Sampler, apply_steps
    from .saving import Saving
    from .sequence import Sequence

__version__ = "0.1.0"

# Imported when they are asked for: together they take three times as long as the rest.
_LATER = {
    **dict.fromkeys(("BeamMove", "BeamSearch", "Hypothesis"), "beams"),
    **dict.fromkeys(("HostOffload", "Transfer"), "offload"),
    **dict.fromkeys(("Sampler", "apply_steps"), "sampler"),
    "PagedKVCache": "kvcache",
    "Saving": "saving",
    "Sequence": "sequence",
    "steps": "steps",
}

__all__ = [
    "AttentionPlan",
    "BeamMove",
    "BeamSearch",
    "BeamStep",
    "BlockError",
    "BlockPool",
    "DamagedSaveError",
    "HostOffload",
    "Hypothesis",
    "InvalidLogitsError",
    "Logprobs",
    "OutOfBlocksError",
    "PagedKVCache",
    "PrefixCache",
    "SampleState",
    "Sampler",
    "SamplingParams",
    "Saving",
    "Sequence",
    "Stream",
    "Support",
    "Transfer",
    "Verified",
    "append_kv",
    "apply_bias",
    "apply_penalties",
    "apply_steps",
    "apply_token_bitmask",
    "argmax",
    "attention_step",
    "beam_step",
    "copy_blocks",
    "decode_attention",
    "extend_attention",
    "gather_blocks",
    "gather_kv",
    "get_num_threads",
    "get_stream_threshold",
    "info",
    "log_softmax",
    "logprobs",
    "logsumexp",
    "merge_state",
    "merge_states",
    "min_p_mask",
    "permute_blocks",
    "prefix_cut",
    "relayout",
    "sample",
    "sample_from_probs",
    "sample_n",
    "scale",
    "scatter_blocks",
    "set_num_threads",
    "set_stream_threshold",
    "softmax",
    "softmax_stats",
    "steps",
    "swap_blocks",
    "top_k",
    "top_k_mask",
    "top_k_renorm",
    "top_p_mask",
    "top_p_renorm",
    "tune",
    "use",
    "using",
    "verify",
    "verify_draft",
    "zero_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    globals()[name] = found = module if name == _LATER[name] else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})

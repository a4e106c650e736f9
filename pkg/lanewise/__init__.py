"""From logits to token on a CPU: the same inputs and seed give the same token, bit for bit, on every CPU."""

from . import steps
from ._dispatch import info, use, using
from ._threads import get_num_threads, set_num_threads
from ._tune import tune
from .attention import AttentionPlan, decode_attention, extend_attention, merge_state, merge_states, softmax_stats
from .attention_steps import attention_step, prefix_cut
from .beams import BeamMove, BeamSearch, Hypothesis
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
from .kvcache import PagedKVCache
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
from .offload import HostOffload, Transfer
from .params import SamplingParams
from .pool import BlockPool, PrefixCache
from .sampler import Sampler, apply_steps
from .sampling import Support, argmax, sample, top_k
from .saving import Saving
from .scoring import Logprobs, logprobs
from .sequence import Sequence
from .state import SampleState
from .stream import Stream
from .transfer import append_kv, gather_kv, relayout
from .values import log_softmax, logsumexp, scale, softmax

__version__ = "0.1.0"
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

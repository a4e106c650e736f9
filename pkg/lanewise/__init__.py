"""From logits to token on a CPU: the same inputs and seed give the same token, bit for bit, on every CPU."""

from ._dispatch import info, use, using
from ._threads import get_num_threads, set_num_threads
from ._tune import tune
from .attention import AttentionPlan, decode_attention, extend_attention, merge_state, merge_states
from .drawing import sample_from_probs, sample_n, verify
from .errors import BlockError, InvalidLogitsError, OutOfBlocksError
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
from .params import SamplingParams
from .pool import BlockPool, PrefixCache
from .sampling import Support, argmax, sample, top_k
from .scoring import Logprobs, logprobs
from .state import SampleState
from .steps import attention_step, prefix_cut
from .stream import Stream
from .values import log_softmax, logsumexp, scale, softmax

__version__ = "0.1.0"
__all__ = [
    "AttentionPlan",
    "BlockError",
    "BlockPool",
    "InvalidLogitsError",
    "Logprobs",
    "OutOfBlocksError",
    "PrefixCache",
    "SampleState",
    "SamplingParams",
    "Stream",
    "Support",
    "apply_bias",
    "apply_penalties",
    "apply_token_bitmask",
    "argmax",
    "attention_step",
    "decode_attention",
    "extend_attention",
    "get_num_threads",
    "info",
    "log_softmax",
    "logprobs",
    "logsumexp",
    "merge_state",
    "merge_states",
    "min_p_mask",
    "prefix_cut",
    "sample",
    "sample_from_probs",
    "sample_n",
    "scale",
    "set_num_threads",
    "softmax",
    "top_k",
    "top_k_mask",
    "top_k_renorm",
    "top_p_mask",
    "top_p_renorm",
    "tune",
    "use",
    "using",
    "verify",
]

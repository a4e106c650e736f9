"""From logits to token on a CPU: the same inputs and seed give the same token, bit for bit, on every CPU."""

from ._dispatch import info, use, using
from ._tune import tune
from .drawing import sample_from_probs, sample_n, verify
from .errors import InvalidLogitsError
from .params import SamplingParams, Stream
from .sampling import Support, argmax, sample, top_k
from .state import SampleState
from .values import log_softmax, logsumexp, scale, softmax

__version__ = "0.1.0"
__all__ = [
    "InvalidLogitsError",
    "SampleState",
    "SamplingParams",
    "Stream",
    "Support",
    "argmax",
    "info",
    "log_softmax",
    "logsumexp",
    "sample",
    "sample_from_probs",
    "sample_n",
    "scale",
    "softmax",
    "top_k",
    "tune",
    "use",
    "using",
    "verify",
]

"""lanewise's attention as one of transformers' attention implementations: attn_implementation="lanewise"."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import extend_attention
from ._host import need
from ._tensors import torch

WORKS = "5.0 to 5.24"
host: Any = need("transformers.modeling_utils", package="transformers", works=WORKS, names=("AttentionInterface",))
masking: Any = need(
    "transformers.masking_utils", package="transformers", works=WORKS, names=("AttentionMaskInterface", "sdpa_mask")
)
sdpa: Any = need("transformers.integrations.sdpa_attention", package="transformers", works=WORKS)

NOT_HERE = ("sinks", "indices", "block_indices")  # one sink a query; keys chosen a query: models ask for these by name
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Queries (B, heads, n, D) over keys and values (B, kv_heads, S, D), which stay where they are: (B, n, heads, D).

    s_aux: sinks, one a head, as GPT-OSS has. Windows come with the mask. Other devices, dropout, gradients and biases
    of positions are left to torch, whose scaled_dot_product_attention has neither soft cap nor sinks: ValueError.
    """
    for name in NOT_HERE:
        if kwargs.get(name) is not None:
            raise ValueError(f'attention with {name} needs attn_implementation="eager"')
    if dropout or kwargs.get("position_bias") is not None or not all(map(takes, (query, key, value))):
        if s_aux is not None:
            raise ValueError(
                "with sinks, attention on other devices, with dropout, gradients or position biases needs "
                'attn_implementation="eager"'
            )
        kwargs |= {} if softcap is None else {"softcap": softcap}
        return sdpa.sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    rows, heads, count, width = query.shape
    length = key.shape[2]
    causal = (
        attention_mask is None
        and count > 1
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    if causal and count != length:  # torch's is the other corner
        raise ValueError(f"{count} queries over {length} keys need a mask to say which keys they see")
    mixed = extend_attention(
        query.transpose(1, 2).reshape(rows * count, heads, width),
        key,
        value,
        None,
        np.full(rows, length, np.int64),
        np.arange(rows + 1) * count,
        causal=causal,
        scale=scaling,
        soft_cap=softcap,
        sinks=None if s_aux is None else s_aux.detach().float(),
        mask=by_query(attention_mask, rows, heads, count, length),
    )
    return torch.from_numpy(mixed).to(query.dtype).view(rows, count, heads, -1), None


def takes(states: Any) -> bool:
    return (
        states.device.type == "cpu"
        and states.dtype in DTYPES
        and not (states.requires_grad and torch.is_grad_enabled())
    )


def by_query(mask: Any, rows: int, heads: int, count: int, length: int) -> Any:
    """A mask (B or 1, heads or 1, n, S or more) as (queries, S), or (queries, heads, S) where heads have their own."""
    if mask is None:
        return None
    mask = mask[..., :length]
    mask = mask if mask.dtype == torch.bool else mask.float()
    if mask.shape[1] == 1:
        return mask.expand(rows, 1, count, length).reshape(rows * count, length)
    return mask.expand(rows, heads, count, length).transpose(1, 2).reshape(rows * count, heads, length)


def register() -> None:
    """Makes attn_implementation="lanewise" known."""
    host.AttentionInterface.register("lanewise", attend)
    masking.AttentionMaskInterface.register("lanewise", masking.sdpa_mask)

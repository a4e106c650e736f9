from typing import Any, final

from typing_extensions import Self

from lanewise._types import Array, Float, Floats32, Floats64, Int, KvLayout, LseBase

__test__: dict[str, str]  # added by Cython

@final
class AttentionPlan:
    num_queries: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    def __new__(
        cls,
        block_table: Array,
        lengths: Array,
        *,
        num_heads: Int,
        num_kv_heads: Int,
        block_size: Int,
        query_start: Array | None = None,
        causal: bool = True,
        window: Int | None = None,
        shared_prefix: Int = 0,
        hide_null: bool = False,
    ) -> Self: ...
    def run(
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array | None,
        *,
        layout: KvLayout = "HND",
        scale: Float | None = None,
        soft_cap: Float | None = None,
        slopes: Array | None = None,
        sinks: Array | None = None,
        mask: Array | None = None,
        k_scales: Array | None = None,
        v_scales: Array | None = None,
        return_lse: bool = False,
        lse_base: LseBase = "e",
        out: Floats32 | None = None,
    ) -> Any: ...  # an array, or with return_lse a pair
    def _time_scan(self, k_cache: Array, v_cache: Array, repeats: int, *, layout: KvLayout = "HND") -> Any: ...

def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array | None,
    block_table: Array | None,
    lengths: Array,
    *,
    layout: KvLayout = "HND",
    scale: Float | None = None,
    window: Int | None = None,
    soft_cap: Float | None = None,
    slopes: Array | None = None,
    sinks: Array | None = None,
    mask: Array | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    shared_prefix: Int = 0,
    hide_null: bool = False,
    return_lse: bool = False,
    lse_base: LseBase = "e",
    out: Floats32 | None = None,
) -> Any: ...
def extend_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array | None,
    block_table: Array | None,
    lengths: Array,
    query_start: Array,
    *,
    causal: bool = True,
    layout: KvLayout = "HND",
    scale: Float | None = None,
    window: Int | None = None,
    soft_cap: Float | None = None,
    slopes: Array | None = None,
    sinks: Array | None = None,
    mask: Array | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    shared_prefix: Int = 0,
    hide_null: bool = False,
    return_lse: bool = False,
    lse_base: LseBase = "e",
    out: Floats32 | None = None,
) -> Any: ...
def merge_state(
    v_a: Array,
    s_a: Array,
    v_b: Array,
    s_b: Array,
    *,
    lse_base: LseBase = "e",
    out: tuple[Floats32, Floats32] | None = None,
) -> tuple[Floats32, Floats32]: ...
def merge_states(
    v: Array, s: Array, *, lse_base: LseBase = "e", out: tuple[Floats32, Floats32] | None = None
) -> tuple[Floats32, Floats32]: ...
def softmax_stats(
    scores: Array, state: tuple[Any, Any] | None = None, *, out: tuple[Floats32, Floats64] | None = None
) -> Any: ...  # a pair of arrays, or of numbers

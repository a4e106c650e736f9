# The table of operations, for Cython. Members are declared as csrc/ops.h has them; the C compiler checks them.
from libc.stdint cimport int64_t, uint64_t


cdef extern from "ops.h":
    enum:
        OP_softmax, OP_log_softmax, OP_logsumexp, OP_scale, OP_argmax, OP_top_k, OP_sample, OP_logprobs
        OP_sample_n, OP_verify, OP_sample_from_probs, OP_draw_tile, OP_chain
        OP_top_k_mask, OP_top_p_mask, OP_min_p_mask, OP_top_k_renorm, OP_top_p_renorm
        OP_apply_penalties, OP_apply_bias, OP_apply_token_bitmask
        OP_attend, OP_attend_merge, OP_merge_states, OP_softmax_stats
        OP_beam_step, OP_verify_draft
        OP_exp32, OP_exp_rough, OP_log64, OP_widen, OP_weights, OP_philox, OP_gumbel
        OP_move_blocks, OP_zero_blocks
        OP_read_max, OP_read_exp, OP_copy, OP_scan_kv
        OP_move_kv, OP_check_kv
        OP_COUNT

    enum:
        DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8

    struct span:
        void *ptr
        int64_t bytes

    struct side:
        int64_t dtype, dim, chunk, chunk_stride
        int64_t layer, block, head, token
        int64_t scale_layer, scale_block, scale_head, scale_token

    struct row_args:
        span x, out, temperature
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, out_stride, temperature_step

    struct top_k_args:
        span x, values, ids, status
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, k, width, ties_all, force_exact

    struct sample_params:
        double temperature, top_p, min_p, u
        double repetition_penalty, frequency_penalty, presence_penalty
        int64_t top_k, min_keep
        uint64_t seed, key, step

    enum:
        STEP_TEMPERATURE, STEP_TOP_K, STEP_TOP_P, STEP_MIN_P, STEP_LIMIT
        MASK_NONE, MASK_BOOL, MASK_BITS
        TIES_TOP_K, TIES_TOP_P
        SAMPLE_MAX_VOCAB

    struct sample_args:
        span x, params, mask
        span bias_ids, bias_values, bias_offsets
        span prompt_ids, prompt_offsets, output_ids, output_offsets
        span tokens, support_ids, support_logprobs, support_counts, margins
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, mask_kind, mask_stride, mask_width
        int64_t bias_dense, bias_stride, has_u, ties_all, force_exact
        int64_t steps[8]
        int64_t n

    struct chain_step:
        double step
        double number[3]

    struct chain_row:
        int64_t first_step, steps

    struct chain_args:
        span x, params, mask
        span bias_ids, bias_values, bias_offsets
        span prompt_ids, prompt_offsets, output_ids, output_offsets
        span added_ids, added_values, added_offsets
        span chain_rows, steps, state, tokens, support_ids, support_logprobs, support_counts
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, mask_kind, mask_stride, mask_width
        int64_t bias_dense, bias_stride, force_exact

    struct probs_args:
        span x, params, ids
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, n, has_u

    struct tile_args:
        span x, score, token
        int64_t rows, first_row, cols, dtype, first
        double temperature
        uint64_t seed, key, step

    struct filter_args:
        span x, out, params, status
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, out_stride, ties_all, force_exact

    struct edit_args:
        span x, out, params, mask
        span bias_ids, bias_values, bias_offsets
        span prompt_ids, prompt_offsets, output_ids, output_offsets
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, out_stride, out_dtype
        int64_t mask_kind, mask_stride, mask_width, bias_dense, bias_stride

    struct logprobs_args:
        span x, params, mask
        span bias_ids, bias_values, bias_offsets
        span prompt_ids, prompt_offsets, output_ids, output_offsets
        span tokens, ids, chosen, rank, top_ids, top_logprobs, given, entropy
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, mask_kind, mask_stride, mask_width
        int64_t bias_dense, bias_stride, top_n, ids_width, ids_step, force_exact

    struct attend_query:
        int64_t lo, hi, position, states

    struct attend_task:
        int64_t table_row, kv_head, first_query, queries, first_head, heads, first_chunk, end_chunk

    enum:
        ATTEND_CHUNK, ATTEND_ROWS
        ATTEND_MASK_NONE, ATTEND_MASK_BOOL, ATTEND_MASK_ADDED

    struct attend_args:
        span q, k, v, k_scales, v_scales, table, queries, tasks, mask, slopes, sinks, out, lse, states
        int64_t rows, first_row, cols, heads, block_size, table_stride
        side key, value
        int64_t mask_kind, mask_query, mask_head
        double scale, soft_cap, lse_unit

    struct merge_args:
        span values, lse, out, out_lse
        int64_t rows, first_row, cols, width
        int64_t value_row, value_part, lse_row, lse_part
        double lse_unit

    struct stats_args:
        span x, m, sums
        int64_t rows, first_row, cols, dtype, x_stride

    struct kv_args:
        span src, dst, src_scales, dst_scales
        span sources, targets, cos, sin, positions, status
        int64_t rows, first_row, cols
        side from_ "from"
        side to
        int64_t layers, heads, from_tokens, to_tokens, rotary, interleaved

    struct move_args:
        span src, dst, sources, targets, sizes
        int64_t rows, first_row, cols
        int64_t together, bytes, layers
        int64_t src_at, src_block, src_layer
        int64_t dst_at, dst_block, dst_layer
        int64_t stream

    enum:
        BEAM_LIMIT
        DRAFT_NOISE, DRAFT_RATIO, DRAFT_BLOCK, DRAFT_TYPICAL

    struct beam_args:
        span x, scores, perturbed, params, mask
        span bias_ids, bias_values, bias_offsets
        span prompt_ids, prompt_offsets, output_ids, output_offsets
        span eos_ids, to_scores, to_perturbed, to_beams, to_tokens
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, mask_kind, mask_stride, mask_width
        int64_t bias_dense, bias_stride
        int64_t groups, beams, n, eos_count, force_exact
        double diversity_penalty

    struct draft_args:
        span x, q, params, mask
        span bias_ids, bias_values, bias_offsets
        span prompt_ids, prompt_offsets, output_ids, output_offsets
        span starts, draft, parents, u, tokens, path, accepted
        int64_t rows, first_row, cols, dtype
        int64_t x_stride, q_stride, mask_kind, mask_stride, mask_width
        int64_t bias_dense, bias_stride
        int64_t of_probs, method, width, ties_all, force_exact
        int64_t steps[8]
        double limits[2]

    struct noise_args:
        span out
        int64_t rows, first_row, cols, first, domain
        uint64_t seed, key, step


# Runs `op` on the ISA it is bound to, without the GIL, its rows shared among threads if they are work enough. args is
# the operation's struct; row_work what a row costs, in elements that a maximum could read meanwhile (0: it reads them).
cdef int run(int op, const void *args, int64_t cols, int64_t row_work=*) except -1

# Whether operations that have a fast path are to take the exact one: a test's switch.
cdef int64_t force_exact()

# float32 of numbers or an array, rounded to nearest whatever the caller's floating-point mode.
cdef object to_float32(object array)

# Benches: runs `op` so often on this thread; the nanoseconds of each run.
cdef object timed(int op, const void *args, int64_t cols, int64_t repeats)

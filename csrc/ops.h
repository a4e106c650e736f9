/* What a kernel is to the outside: its number and its args struct.

   Every args struct begins with its spans (all memory a kernel may touch, bar scratch), then `rows` and `first_row`:
   a kernel does rows first_row .. first_row + rows - 1. That one rule lets a test record any call and replay it
   elsewhere, and lets threads share a call. */
#ifndef LANEWISE_OPS_H
#define LANEWISE_OPS_H

#include <stddef.h>
#include <stdint.h>

enum {
#define KERNEL(group, name, args, scratch_bytes) OP_##name,
#include "kernels.def"
#undef KERNEL
  OP_COUNT
};

enum { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8 }; /* logits are never int8 */

/* scratch: per-thread memory of at least lanewise_scratch_bytes(op, cols), 64-byte aligned, contents undefined */
typedef void (*lanewise_kernel)(const void *args, void *scratch);

struct span {
  void *ptr;
  int64_t bytes;
};

/* Strides are in bytes and may be negative or zero; along a row elements are adjacent. */
struct row_args {
  struct span x, out, temperature;
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride, out_stride;
  int64_t temperature_step; /* doubles from one row's temperature to the next: 0 or 1 */
};

struct top_k_args {
  struct span x, values, ids, status; /* float32, int64, int64 */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride;
  int64_t k;     /* 1..cols */
  int64_t width; /* entries a row of values and ids can hold, >= k */
  int64_t ties_all;
  int64_t force_exact;
};

/* One row's numbers, in the units users give them. */
struct sample_params {
  double temperature, top_p, min_p, u;
  double repetition_penalty, frequency_penalty, presence_penalty;
  int64_t top_k, min_keep;
  uint64_t seed, key, step;
};

enum { STEP_TEMPERATURE = 1, STEP_TOP_K, STEP_TOP_P, STEP_MIN_P, STEP_LIMIT = 8 };
enum { MASK_NONE, MASK_BOOL, MASK_BITS };
enum { TIES_TOP_K = 1, TIES_TOP_P = 2 };

struct sample_args {
  struct span x, params;
  struct span mask;                                /* bytes, or 32-bit words */
  struct span bias_ids, bias_values, bias_offsets; /* int64, float32, int64[rows + 1]; or dense float32 values */
  struct span prompt_ids, prompt_offsets;          /* int64, int64[rows + 1] */
  struct span output_ids, output_offsets;
  struct span tokens;                                        /* int64[rows], of sample_n int64[rows][n] */
  struct span support_ids, support_logprobs, support_counts; /* int64[rows][cols], float32[rows][cols], int64[rows] */
  struct span margins;                                       /* float64[rows]: by which verify's tokens won */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride;
  int64_t mask_kind, mask_stride, mask_width; /* width in ids; ids beyond are forbidden */
  int64_t bias_dense, bias_stride;
  int64_t has_u;
  int64_t ties_all; /* TIES_TOP_K, TIES_TOP_P: these also keep what equals the last they keep */
  int64_t force_exact;
  int64_t steps[STEP_LIMIT]; /* the order of truncations, ended by 0 */
  int64_t n;                 /* ids a row that sample_n draws, 1..cols */
};

/* What a chain's steps are; a step is its number and up to three of its own (_program.py). */
enum {
  CHAIN_TEMPERATURE = 1,
  CHAIN_TOP_K,
  CHAIN_TOP_P,
  CHAIN_MIN_P,
  CHAIN_DYNAMIC_TEMPERATURE,
  CHAIN_QUADRATIC,
  CHAIN_TYPICAL,
  CHAIN_EPSILON,
  CHAIN_ETA,
  CHAIN_TOP_H,
  CHAIN_TOP_A,
  CHAIN_TAIL_FREE,
  CHAIN_TOP_N_SIGMA,
  CHAIN_XTC,
  CHAIN_RENORMALISE,
  CHAIN_MIROSTAT,
  CHAIN_MIROSTAT_V2,
  CHAIN_ADAPTIVE_P
};

struct chain_step {
  double step, number[3];
};

/* A row's part of the steps. */
struct chain_row {
  int64_t first_step, steps;
};

/* Edits are as in sample_args; of params, penalties and seed, key and step count. */
struct chain_args {
  struct span x, params;
  struct span mask;
  struct span bias_ids, bias_values, bias_offsets;
  struct span prompt_ids, prompt_offsets, output_ids, output_offsets;
  struct span added_ids, added_values, added_offsets; /* as a sparse bias, after the penalties */
  struct span chain_rows, steps;                      /* chain_row[rows], chain_step[] */
  struct span state;                                  /* float64[rows][2], which draws change */
  struct span tokens;
  struct span support_ids, support_logprobs, support_counts; /* as in sample_args */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride;
  int64_t mask_kind, mask_stride, mask_width;
  int64_t bias_dense, bias_stride;
  int64_t force_exact;
};

struct probs_args {
  struct span x, params, ids; /* of params only seed, key, step and u; int64[rows][n] */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride, n, has_u; /* with u, n is 1 */
};

/* Logits of the ids first .. cols - 1, whose best score comes out as hi and lo. */
struct tile_args {
  struct span x, score, token; /* float64[2], int64[1] */
  int64_t rows, first_row, cols, dtype;
  int64_t first; /* rows is 1 */
  double temperature;
  uint64_t seed, key, step;
};

/* One truncation of logits or probabilities, to rows of float32. */
struct filter_args {
  struct span x, out, params;
  struct span status; /* int64[rows]: -1 for an invalid row, else 0 */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride, out_stride;
  int64_t ties_all, force_exact;
};

/* Penalties, a bias or a mask, written out; named as in sample_args. out may be x. */
struct edit_args {
  struct span x, out, params;
  struct span mask;
  struct span bias_ids, bias_values, bias_offsets;
  struct span prompt_ids, prompt_offsets;
  struct span output_ids, output_offsets;
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride, out_stride, out_dtype; /* float32; for a mask also x's */
  int64_t mask_kind, mask_stride, mask_width;
  int64_t bias_dense, bias_stride;
};

/* Of each row, what has a place to go. Edits are as in sample_args; of params, temperature and penalties count. */
struct logprobs_args {
  struct span x, params;
  struct span mask;
  struct span bias_ids, bias_values, bias_offsets;
  struct span prompt_ids, prompt_offsets, output_ids, output_offsets;
  struct span tokens, ids;           /* int64[rows], int64[rows or 1][ids_width]; below 0 is none */
  struct span chosen, rank;          /* float32[rows], int64[rows] */
  struct span top_ids, top_logprobs; /* int64[rows][top_n], float32[rows][top_n] */
  struct span given, entropy;        /* float32[rows][ids_width], float32[rows] */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride;
  int64_t mask_kind, mask_stride, mask_width;
  int64_t bias_dense, bias_stride;
  int64_t top_n;               /* 0..cols */
  int64_t ids_width, ids_step; /* ids from one row's to the next: ids_width, or 0 */
  int64_t force_exact;
};

/* One step of beam search for `rows` searches, each `groups` groups of `beams` beams: beam b of group g of search r is
   row (r * groups + g) * beams + b of the logits. Edits are as in sample_args, one row a beam. */
struct beam_args {
  struct span x, scores, perturbed; /* float64[beams in all] each; perturbed only of stochastic beams */
  struct span params;               /* of each beam: penalties; for stochastic beams seed, key and step */
  struct span mask;
  struct span bias_ids, bias_values, bias_offsets;
  struct span prompt_ids, prompt_offsets, output_ids, output_offsets;
  struct span eos_ids;                                      /* int64[eos_count] */
  struct span to_scores, to_perturbed, to_beams, to_tokens; /* float64, float64, int64, int64 [groups in all][n] */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride;
  int64_t mask_kind, mask_stride, mask_width;
  int64_t bias_dense, bias_stride;
  int64_t groups, beams, n, eos_count;
  int64_t force_exact;
  double diversity_penalty;
};

enum { BEAM_LIMIT = 512 }; /* beams of a search; candidates of a group, if these are not fewer than columns */

enum { DRAFT_NOISE, DRAFT_RATIO, DRAFT_BLOCK, DRAFT_TYPICAL };

/* Drafts of `rows` sequences, checked. A sequence of n drafts has n + 1 rows of the target: the first follows what is
   there, each other follows the draft before it, or in a tree the draft of its number. Edits are one row of these. */
struct draft_args {
  struct span x, q; /* q: float32, one row a draft; NULL: the drafts are certain */
  struct span params;
  struct span mask;
  struct span bias_ids, bias_values, bias_offsets;
  struct span prompt_ids, prompt_offsets, output_ids, output_offsets;
  struct span starts;                 /* int64[rows][3]: first row of the target, first draft, how many drafts */
  struct span draft, parents;         /* int64, one a draft; parents, -1 for none, come before; NULL: a chain */
  struct span u;                      /* float64, one a row of the target; NULL: of the seed */
  struct span tokens, path, accepted; /* int64[rows][width], int64[rows][width - 1], int64[rows]; -1: invalid */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride, q_stride;
  int64_t mask_kind, mask_stride, mask_width;
  int64_t bias_dense, bias_stride;
  int64_t of_probs, method, width; /* of_probs: x is float32 probabilities */
  int64_t ties_all, force_exact;
  int64_t steps[STEP_LIMIT];
  double limits[2]; /* typical: epsilon, alpha; a tree without q: of one, of the sum */
};

/* How the keys or the values lie in a cache: bytes from one layer, block, head and token to the next. Along head_dim
   `chunk` elements are adjacent, and chunks are chunk_stride bytes apart: one chunk holds all of it (chunk == dim), or
   a few (the transposed layouts). Token t of a sequence is token t % block_size of its block t / block_size.
   An int8 code c stands for scale * (c - zero), scale and zero two adjacent float32 of each (block, head, token). */
struct side {
  int64_t dtype, dim, chunk, chunk_stride;
  int64_t layer, block, head, token;
  int64_t scale_layer, scale_block, scale_head, scale_token;
};

/* Whole blocks, as bytes: move i takes block sources[i] to block targets[i], in each of `layers`; without ids, block i.
   A row is one move, or `together` of them that are made in their order. Block -1 is a spare one, in scratch. */
struct move_args {
  struct span src, dst;          /* all memory that blocks may lie in; zero_blocks reads none */
  struct span sources, targets;  /* int64, one a move */
  struct span sizes;             /* int64: bytes of each move, where they differ */
  int64_t rows, first_row, cols; /* cols: bytes of the spare block, 0 without one */
  int64_t together, bytes, layers;
  int64_t src_at, src_block, src_layer; /* bytes to block 0, and from one block and layer to the next */
  int64_t dst_at, dst_block, dst_layer;
  int64_t stream; /* runs of some length go around the caches */
};

/* What a query sees of its sequence: the keys lo .. hi - 1, itself standing at `position` among them. `states` is where
   the states of its chunks begin, if it is worked on in pieces; else -1. */
struct attend_query {
  int64_t lo, hi, position, states;
};

/* Some queries of one row of the table, some heads of one group, some chunks: no more than ATTEND_ROWS (query, head)
   pairs. */
struct attend_task {
  int64_t table_row, kv_head;
  int64_t first_query, queries, first_head, heads;
  int64_t first_chunk, end_chunk;
};

enum { ATTEND_CHUNK = 256, ATTEND_ROWS = 128 };
enum { ATTEND_MASK_NONE, ATTEND_MASK_BOOL, ATTEND_MASK_ADDED };

/* rows are tasks for attend, queries for attend_merge. A state is the maximum of a chunk's scores, the sum of its
   exponentials and the v_width sums of values weighted by them, one for each query head. */
struct attend_args {
  struct span q, k, v;            /* q float32[queries][heads][k.dim]; k and v as the sides say */
  struct span k_scales, v_scales; /* of int8: scale and zero, float32 */
  struct span table;              /* int64[..][table_stride]: block ids; below 0 hides the block's keys */
  struct span queries, tasks;     /* attend_query[], attend_task[] */
  struct span mask;               /* bytes or float32, key after key */
  struct span slopes, sinks;      /* float32[heads], or none */
  struct span out, lse;           /* float32[queries][heads][v.dim]; float32[queries][heads] or none */
  struct span states;             /* float32[..][heads][2 + v_width] */
  int64_t rows, first_row, cols;  /* cols: bytes of scratch */
  int64_t heads, block_size, table_stride;
  struct side key, value;
  int64_t mask_kind, mask_query, mask_head; /* bytes from a query's to the next's, from a head's to the next's */
  double scale, soft_cap, lse_unit;         /* soft_cap 0: none; lse is in natural logarithms times lse_unit */
};

/* Outputs over parts of the keys, joined by their logarithms of sums: rows of `cols` outputs each. Strides are in
   floats. out may be the values of a state where each row has one place for both. */
struct merge_args {
  struct span values, lse, out, out_lse; /* float32; out[rows][width], out_lse[rows] or none */
  int64_t rows, first_row, cols, width;  /* cols: outputs a row */
  int64_t value_row, value_part, lse_row, lse_part;
  double lse_unit; /* as in attend_args */
};

/* Rows of scores, whose maxima and sums of exponentials are joined to those that are there: -inf and 0 for none. */
struct stats_args {
  struct span x, m, sums; /* float32[rows], float64[rows] */
  int64_t rows, first_row, cols, dtype;
  int64_t x_stride;
};

/* Rows of keys or values: item i moves the row of each layer and head from slot sources[i] to slot targets[i]; without
   slots, from or to slot i; what has one below 0 is skipped. A slot is block * tokens of a block + token. Pair p of the
   first `rotary` elements is turned by cos and sin [positions[i]][p]: elements p and p + rotary / 2, or neighbours. */
struct kv_args {
  struct span src, dst, src_scales, dst_scales; /* what the sides stride over */
  struct span sources, targets;                 /* int64[first_row + rows] or none */
  struct span cos, sin, positions;              /* float32[][rotary / 2], int64[first_row + rows] */
  struct span status;                           /* of check_kv: int64[first_row + rows] */
  int64_t rows, first_row, cols;                /* cols is dim */
  struct side from, to;
  int64_t layers, heads, from_tokens, to_tokens;
  int64_t rotary, interleaved; /* rotary 0: none */
};

/* out[i] for the ids or counters i = first .. first + cols - 1 */
struct noise_args {
  struct span out;
  int64_t rows, first_row, cols; /* rows is 1 */
  int64_t first, domain;
  uint64_t seed, key, step;
};

enum { SAMPLE_MAX_VOCAB = 1 << 20 };

static inline size_t lanewise_scratch_bytes(int op, int64_t cols) {
  static const size_t a_column[] = {
#define KERNEL(group, name, args, scratch_bytes) scratch_bytes,
#include "kernels.def"
#undef KERNEL
  };
  return a_column[op] * (size_t)cols + (64u << 10);
}

/* One table a unit. */
struct isa_table {
  const char *name;
  lanewise_kernel kernels[OP_COUNT];
};

#endif

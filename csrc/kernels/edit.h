/* The row as it is judged, written out: widened to float32, then bias, penalties and mask, in that order. What does it
   lazily, and must agree, is judged.h. */

/* -inf fills the last vector beyond the row; adding 0 makes both zeros one. */
struct text {
  float *z;
  const void *x;
  size_t n;
  int64_t dtype;
};
INLINE void write_out_as(const struct text *t, void *scratch, int dtype) {
  (void)scratch;
  const vf zero = v_set1(0.0f);
  for (size_t i = 0; i < t->n; i += LANES) {
    vf v = t->n - i >= LANES ? row_load(t->x, i, dtype) : row_load_n(t->x, i, t->n - i, dtype, -INFINITY);
    v_store(t->z + i, v_add(v, zero));
  }
}
static void write_out(float *z, const void *x, size_t n, int64_t dtype) {
  const struct text t = {z, x, n, dtype};
  FOR_DTYPE(write_out_as, &t, NULL)
}

/* What the args structs of all that draws or scores say of rows and their edits, as members of a sample_args. */
#define EDITS_OF(a)                                                                                             \
  .x = (a)->x, .mask = (a)->mask, .bias_ids = (a)->bias_ids, .bias_values = (a)->bias_values,                   \
  .bias_offsets = (a)->bias_offsets, .prompt_ids = (a)->prompt_ids, .prompt_offsets = (a)->prompt_offsets,      \
  .output_ids = (a)->output_ids, .output_offsets = (a)->output_offsets, .cols = (a)->cols, .dtype = (a)->dtype, \
  .x_stride = (a)->x_stride, .mask_kind = (a)->mask_kind, .mask_stride = (a)->mask_stride,                      \
  .mask_width = (a)->mask_width, .bias_dense = (a)->bias_dense, .bias_stride = (a)->bias_stride

struct ids {
  const int64_t *id;
  size_t count;
};

INLINE struct ids ids_of(const struct span *ids, const struct span *offsets, int64_t row) {
  if (!ids->ptr) {
    return (struct ids){NULL, 0};
  }
  const int64_t *o = (const int64_t *)offsets->ptr + row;
  return (struct ids){(const int64_t *)ids->ptr + o[0], (size_t)(o[1] - o[0])};
}

/* What a sparse bias adds to each of its ids. */
INLINE const float *bias_values(const struct sample_args *a, struct ids ids) {
  return (const float *)a->bias_values.ptr + (ids.count ? ids.id - (const int64_t *)a->bias_ids.ptr : 0);
}

static void add_bias(float *z, size_t n, const struct sample_args *a, int64_t row) {
  if (a->bias_dense) {
    const float *bias = row_of(a->bias_values.ptr, a->bias_stride, row);
    for (size_t i = 0; i < n; i++) {
      z[i] += bias[i];
    }
    return;
  }
  struct ids ids = ids_of(&a->bias_ids, &a->bias_offsets, row);
  const float *values = bias_values(a, ids);
  for (size_t i = 0; i < ids.count; i++) {
    z[ids.id[i]] += values[i];
  }
}

enum { SEEN = 1u << 31 }; /* marks an id that is penalised; the rest of its count is how often it was put out */

/* A logit after repetition, frequency and presence penalties, in that order, of an id put out this often. */
INLINE float penalised(float v, uint32_t times, const struct sample_params *p) {
  const float repetition = (float)p->repetition_penalty;
  float divided = v / repetition, multiplied = v * repetition;
  v = v > 0.0f ? divided : multiplied;
  float lowered = v - (float)p->frequency_penalty * (float)times - (float)p->presence_penalty;
  return times ? lowered : v;
}

/* Repetition over prompt and output, frequency and presence over output, each id once. */
static void penalise(float *z, uint32_t *counts, struct ids prompt, struct ids output, const struct sample_params *p) {
  struct ids lists[2] = {output, prompt};
  for (int l = 0; l < 2; l++) {
    for (size_t i = 0; i < lists[l].count; i++) {
      counts[lists[l].id[i]] = SEEN;
    }
  }
  for (size_t i = 0; i < output.count; i++) {
    counts[output.id[i]]++;
  }
  for (int l = 0; l < 2; l++) {
    for (size_t i = 0; i < lists[l].count; i++) {
      int64_t id = lists[l].id[i];
      if (counts[id] & SEEN) {
        z[id] = penalised(z[id], counts[id] & ~SEEN, p);
        counts[id] = 0; /* done: a later mention of the id finds nothing to do */
      }
    }
  }
}

/* Which of 64 ids from `first` on a mask allows, a bit each; what it does not reach it forbids. */
struct mask {
  const void *bits;
  int64_t kind;
  size_t width;
};

INLINE struct mask mask_of(const struct sample_args *a, int64_t row) {
  return (struct mask){row_of(a->mask.ptr, a->mask_stride, row), a->mask_kind,
                       min_size((size_t)a->mask_width, (size_t)a->cols)};
}

INLINE uint64_t allowed64(const struct mask *m, size_t first) {
  if (m->kind == MASK_NONE) {
    return ~(uint64_t)0;
  }
  size_t count = m->width > first ? min_size(64, m->width - first) : 0;
  uint64_t allowed = 0;
  if (m->kind == MASK_BITS) {
    const uint32_t *words = (const uint32_t *)m->bits + first / 32;
    allowed = (count ? words[0] : 0) | (uint64_t)(count > 32 ? words[1] : 0) << 32;
  } else {
    const uint8_t *bytes = (const uint8_t *)m->bits + first;
    for (size_t i = 0; i + LANES <= count; i += LANES) {
      allowed |= (uint64_t)b_nonzero(bytes + i) << i;
    }
    for (size_t i = count / LANES * LANES; i < count; i++) {
      allowed |= (uint64_t)(bytes[i] != 0) << i;
    }
  }
  return count < 64 ? allowed & (((uint64_t)1 << count) - 1) : allowed;
}

/* The same of `count` blocks from `first` on; 0 if nothing is allowed in them. */
INLINE uint64_t allowed_of_blocks(uint64_t *allowed, const struct mask *m, size_t first, size_t count) {
  uint64_t any = 0;
  if (m->kind == MASK_BITS &&
      first + 64 * count <= m->width) { /* in one loop with the rest it takes half as long again */
    const uint32_t *words = (const uint32_t *)m->bits + first / 32;
    for (size_t i = 0; i < count; i++) {
      allowed[i] = words[2 * i] | (uint64_t)words[2 * i + 1] << 32;
      any |= allowed[i];
    }
    return any;
  }
  for (size_t i = 0; i < count; i++) {
    allowed[i] = allowed64(m, first + 64 * i);
    any |= allowed[i];
  }
  return any;
}

/* z has room for whole blocks. */
static void forbid(float *z, size_t n, const struct mask *m) {
  for (size_t first = 0; first < n; first += 64) {
    uint64_t allowed = allowed64(m, first);
    for (size_t i = first; i < min_size(first + 64, n); i += LANES, allowed >>= LANES) {
      v_store(z + i, v_select(m_of_bits((unsigned)(allowed & 0xffffu)), v_load(z + i), v_set1(-INFINITY)));
    }
  }
}

/* z has room for whole blocks, counts for n. */
static void write_edited(float *z, uint32_t *counts, const struct sample_args *a, int64_t row) {
  size_t n = (size_t)a->cols;
  write_out(z, row_of(a->x.ptr, a->x_stride, row), n, a->dtype);
  if (a->bias_values.ptr) {
    add_bias(z, n, a, row);
  }
  if (a->prompt_ids.ptr || a->output_ids.ptr) {
    penalise(z, counts, ids_of(&a->prompt_ids, &a->prompt_offsets, row),
             ids_of(&a->output_ids, &a->output_offsets, row), (const struct sample_params *)a->params.ptr + row);
  }
  if (a->mask_kind != MASK_NONE) {
    const struct mask mask = mask_of(a, row);
    forbid(z, n, &mask);
  }
}

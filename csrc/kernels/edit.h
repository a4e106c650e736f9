/* The row as it is judged: widened to float32, then bias, penalties and mask, as if written out in that order. */

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

static void add_bias(float *z, size_t n, const struct sample_args *a, int64_t row) {
  if (a->bias_dense) {
    const float *bias = row_of(a->bias_values.ptr, a->bias_stride, row);
    for (size_t i = 0; i < n; i++) {
      z[i] += bias[i];
    }
    return;
  }
  struct ids ids = ids_of(&a->bias_ids, &a->bias_offsets, row);
  const float *values = (const float *)a->bias_values.ptr + (ids.count ? ids.id - (const int64_t *)a->bias_ids.ptr : 0);
  for (size_t i = 0; i < ids.count; i++) {
    z[ids.id[i]] += values[i];
  }
}

enum { SEEN = 1u << 31 }; /* marks an id that is penalised; the rest of its count is how often it was put out */

/* Repetition over prompt and output, frequency and presence over output, each id once, in that order. */
static void penalise(float *z, uint32_t *counts, struct ids prompt, struct ids output, const struct sample_params *p) {
  const float repetition = (float)p->repetition_penalty, frequency = (float)p->frequency_penalty;
  const float presence = (float)p->presence_penalty;
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
      uint32_t *count = &counts[lists[l].id[i]];
      float *v = &z[lists[l].id[i]];
      if (*count & SEEN) {
        float times = (float)(*count & ~SEEN);
        *v = *v > 0.0f ? *v / repetition : *v * repetition;
        if (times > 0.0f) {
          *v -= frequency * times;
          *v -= presence;
        }
        *count = 0; /* done: a later mention of the id finds nothing to do */
      }
    }
  }
}

static void forbid(float *z, size_t n, const struct sample_args *a, int64_t row) {
  const void *mask = row_of(a->mask.ptr, a->mask_stride, row);
  size_t width = min_size((size_t)a->mask_width, n);
  for (size_t i = 0; i < width; i += LANES) {
    size_t lanes = min_size(LANES, width - i);
    unsigned allowed = 0;
    if (a->mask_kind == MASK_BITS) {
      allowed = ((const uint32_t *)mask)[i / 32] >> i % 32 & 0xffffu;
    } else {
      const uint8_t *bytes = (const uint8_t *)mask + i;
      for (size_t j = 0; j < lanes; j++) {
        allowed |= (unsigned)(bytes[j] != 0) << j;
      }
    }
    store_upto(z, i, width, v_select(m_of_bits(allowed), v_load(z + i), v_set1(-INFINITY)));
  }
  fill(z + width, n - width, -INFINITY);
}

INLINE int has_edits(const struct sample_args *a) {
  return a->bias_values.ptr || a->prompt_ids.ptr || a->output_ids.ptr || a->mask_kind != MASK_NONE;
}

/* z has room for whole vectors, counts for n. */
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
    forbid(z, n, a, row);
  }
}

/* Penalties, a bias or a mask, written out as sample sees them (edit.h). What is not named keeps its bits and, in
   place, is not touched. */

/* The row to be edited: out, after x was copied there unless it is the same memory. */
static void *copied_row(const struct edit_args *a, int64_t row) {
  const void *x = row_of(a->x.ptr, a->x_stride, row);
  void *out = (void *)row_of(a->out.ptr, a->out_stride, row);
  size_t n = (size_t)a->cols;
  if (out == x) {
    return out;
  }
  if (a->out_dtype == a->dtype) {
    memcpy(out, x, n * dtype_size(a->dtype));
  } else {
    widen_to(out, x, n, a->dtype);
  }
  return out;
}

/* A NaN that arithmetic made is the canonical one. */
static void settle(float *z, struct ids ids) {
  for (size_t i = 0; i < ids.count; i++) {
    float *v = &z[ids.id[i]];
    *v = *v == *v ? *v : v_max_across(QUIET_NAN);
  }
}

static void apply_penalties(const struct edit_args *a, void *scratch) {
  FOR_ROWS (r, a) {
    float *z = copied_row(a, r);
    struct ids prompt = ids_of(&a->prompt_ids, &a->prompt_offsets, r);
    struct ids output = ids_of(&a->output_ids, &a->output_offsets, r);
    penalise(z, scratch, prompt, output, (const struct sample_params *)a->params.ptr + r);
    settle(z, prompt);
    settle(z, output);
  }
}

static void add_dense(float *z, const float *bias, size_t n) {
  for (size_t i = 0; i < n; i += LANES) {
    size_t lanes = min_size(LANES, n - i);
    vf v = v_add(v_load_n(z + i, lanes, 0.0f), v_load_n(bias + i, lanes, 0.0f));
    store_upto(z, i, n, v_select(v_unord(v, v), QUIET_NAN, v));
  }
}

static void apply_bias(const struct edit_args *a, void *scratch) {
  (void)scratch;
  FOR_ROWS (r, a) {
    float *z = copied_row(a, r);
    if (a->bias_dense) {
      add_dense(z, row_of(a->bias_values.ptr, a->bias_stride, r), (size_t)a->cols);
      continue;
    }
    struct ids ids = ids_of(&a->bias_ids, &a->bias_offsets, r);
    const float *values = (const float *)a->bias_values.ptr + ((const int64_t *)a->bias_offsets.ptr)[r];
    for (size_t i = 0; i < ids.count; i++) {
      z[ids.id[i]] += values[i];
    }
    settle(z, ids);
  }
}

/* ---- masks ---- */

INLINE void forbid16(float *z, size_t lanes, unsigned allowed) {
  const vm keep = m_of_bits(allowed);
  if (lanes == LANES) {
    v_store(z, v_select(keep, v_load(z), v_set1(-INFINITY)));
  } else {
    v_store_n(z, lanes, v_select(keep, v_load_n(z, lanes, 0.0f), v_set1(-INFINITY)));
  }
}

static void forbid64(float *z, size_t count, uint64_t allowed) {
  for (size_t i = 0; i < count; i += LANES, allowed >>= LANES) {
    if ((allowed & 0xffffu) != 0xffffu) {
      forbid16(z + i, min_size(LANES, count - i), (unsigned)(allowed & 0xffffu));
    }
  }
}

/* Of 16-bit logits, four at a time: the product puts bit j at 16 j. */
static void forbid64_half(uint16_t *z, size_t count, uint64_t allowed, uint64_t lowest) {
  size_t i = 0;
  for (; i + 4 <= count; i += 4, allowed >>= 4) {
    uint64_t v, keep = ((allowed & 15) * 0x0000200040008001u & 0x0001000100010001u) * 0xffffu;
    memcpy(&v, z + i, sizeof v);
    v = (v & keep) | (lowest & ~keep);
    memcpy(z + i, &v, sizeof v);
  }
  for (; i < count; i++, allowed >>= 1) {
    z[i] = allowed & 1 ? z[i] : (uint16_t)lowest;
  }
}

static void apply_token_bitmask(const struct edit_args *a, void *scratch) {
  (void)scratch;
  const uint64_t lowest = a->out_dtype == DTYPE_F16 ? 0xfc00fc00fc00fc00u : 0xff80ff80ff80ff80u; /* -inf, four times */
  size_t n = (size_t)a->cols, blocks = (n + BLOCK - 1) / BLOCK;
  FOR_ROWS (r, a) {
    void *z = copied_row(a, r);
    const struct mask mask = {row_of(a->mask.ptr, a->mask_stride, r), a->mask_kind, min_size((size_t)a->mask_width, n)};
    uint64_t allowed[ROWS];
    for (size_t b = 0; b < blocks; b++) {
      if (b % ROWS == 0) {
        allowed_of_blocks(allowed, &mask, b * BLOCK, min_size(ROWS, blocks - b));
      }
      size_t first = b * BLOCK, count = min_size(BLOCK, n - first);
      if (allowed[b % ROWS] == ~(uint64_t)0) {
        continue;
      }
      if (a->out_dtype == DTYPE_F32) {
        forbid64((float *)z + first, count, allowed[b % ROWS]);
      } else {
        forbid64_half((uint16_t *)z + first, count, allowed[b % ROWS], lowest);
      }
    }
  }
}

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
    memcpy(out, x, n * (a->dtype == DTYPE_F32 ? 4 : 2));
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

/* Bit i: whether byte i is not 0, of 8. */
INLINE uint32_t nonzero8(const uint8_t *bytes) {
  const uint64_t low7 = 0x7f7f7f7f7f7f7f7fu;
  uint64_t v;
  memcpy(&v, bytes, sizeof v);
  v = (((v & low7) + low7) | v) & ~low7;
  return (uint32_t)((v >> 7) * 0x0102040810204080u >> 56);
}

/* What is allowed of the 32 ids from i on; nothing beyond the mask's width. */
INLINE uint32_t allowed32(const void *mask, int64_t kind, size_t i, size_t width) {
  if (i >= width) {
    return 0;
  }
  if (kind == MASK_BITS) {
    return ((const uint32_t *)mask)[i / 32];
  }
  const uint8_t *bytes = (const uint8_t *)mask + i;
  uint8_t tail[32] = {0};
  if (width - i < 32) {
    memcpy(tail, bytes, width - i);
    bytes = tail;
  }
  return nonzero8(bytes) | nonzero8(bytes + 8) << 8 | nonzero8(bytes + 16) << 16 | nonzero8(bytes + 24) << 24;
}

INLINE void forbid16_f32(float *z, size_t lanes, uint32_t allowed) {
  if (lanes >= LANES) {
    v_store(z, v_select(m_of_bits(allowed), v_load(z), v_set1(-INFINITY)));
  } else {
    v_store_n(z, lanes, v_select(m_of_bits(allowed), v_load_n(z, lanes, 0.0f), v_set1(-INFINITY)));
  }
}

INLINE void forbid32_f32(float *z, size_t lanes, uint32_t allowed) {
  if ((allowed & 0xffffu) != 0xffffu) {
    forbid16_f32(z, lanes, allowed & 0xffffu);
  }
  if (allowed >> 16 != 0xffffu && lanes > LANES) {
    forbid16_f32(z + LANES, lanes - LANES, allowed >> 16);
  }
}

/* Four 16-bit lanes: the product puts bit j at 16 j. */
INLINE void forbid4_half(uint16_t *z, uint32_t allowed, uint64_t lowest) {
  uint64_t v, keep = ((allowed & 15) * 0x0000200040008001u & 0x0001000100010001u) * 0xffffu;
  memcpy(&v, z, sizeof v);
  v = (v & keep) | (lowest & ~keep);
  memcpy(z, &v, sizeof v);
}

static void forbid32_half(uint16_t *z, size_t lanes, uint32_t allowed, uint64_t lowest) {
  size_t j = 0;
  for (; j + 4 <= lanes; j += 4) {
    forbid4_half(z + j, allowed >> j, lowest);
  }
  for (; j < lanes; j++) {
    z[j] = allowed >> j & 1 ? z[j] : (uint16_t)lowest;
  }
}

static void apply_token_bitmask(const struct edit_args *a, void *scratch) {
  (void)scratch;
  const uint64_t lowest = a->out_dtype == DTYPE_F16 ? 0xfc00fc00fc00fc00u : 0xff80ff80ff80ff80u; /* -inf, four times */
  size_t n = (size_t)a->cols;
  FOR_ROWS (r, a) {
    void *z = copied_row(a, r);
    const void *mask = row_of(a->mask.ptr, a->mask_stride, r);
    for (size_t i = 0; i < n; i += 32) {
      uint32_t allowed = allowed32(mask, a->mask_kind, i, (size_t)a->mask_width);
      size_t lanes = min_size(32, n - i);
      if (allowed == 0xffffffffu) {
        continue;
      }
      if (a->out_dtype == DTYPE_F32) {
        forbid32_f32((float *)z + i, lanes, allowed);
      } else {
        forbid32_half((uint16_t *)z + i, lanes, allowed, lowest);
      }
    }
  }
}

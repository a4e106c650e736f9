/* move_kv: rows of keys or values from one cache to another, whatever their layout and dtype, keys turned by their
   positions on the way (RoPE: Su et al., arXiv 2104.09864). check_kv: whether those rows may be moved.

   What changes neither dtype nor values is moved as bytes. Everything else is float32 on the way, in one order. */

struct row_place {
  char *row;
  float *scale; /* and the zero behind it; NULL if there are none */
};

struct slot {
  int64_t block, token;
};

INLINE struct row_place place_of(const struct span *memory, const struct span *scales, const struct side *s,
                                 int64_t layer, int64_t head, struct slot at) {
  struct row_place p = {(char *)memory->ptr + row_offset(s, layer, at.block, head, at.token), NULL};
  if (s->dtype == DTYPE_I8) {
    p.scale = (float *)((char *)scales->ptr + scale_offset(s, layer, at.block, head, at.token));
  }
  return p;
}

INLINE int64_t slot_at(const struct span *slots, int64_t item) {
  return slots->ptr ? ((const int64_t *)slots->ptr)[item] : item;
}
INLINE struct slot place_in(int64_t number, int64_t tokens) { return (struct slot){number / tokens, number % tokens}; }

/* ---- values ---- */

INLINE void make_wide(float *to, const void *row, size_t dim, int dtype, float scale, float zero) {
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    v_store(to + i, lanes_load(row, i, LANES, dtype, scale, zero, 0.0f));
  }
  if (i < dim) {
    v_store_n(to + i, dim - i, lanes_load(row, i, dim - i, dtype, scale, zero, 0.0f));
  }
}

/* Pair i of elements, `gap` apart, by the angle of cos[i] and sin[i]. */
INLINE void turn(float *restrict row, const float *restrict cos, const float *restrict sin, size_t pairs, size_t step,
                 size_t gap) {
  for (size_t i = 0; i < pairs; i++) {
    float a = row[i * step], b = row[i * step + gap];
    row[i * step] = a * cos[i] - b * sin[i];
    row[i * step + gap] = b * cos[i] + a * sin[i];
  }
}

/* The row in float32, turned; in scratch. */
INLINE const float *turned_row(const struct kv_args *a, int64_t item, float *wide, const void *row,
                               const float *scale) {
  switch (a->from.dtype) {
  case DTYPE_F32:
    make_wide(wide, row, (size_t)a->from.dim, DTYPE_F32, 0.0f, 0.0f);
    break;
  case DTYPE_F16:
    make_wide(wide, row, (size_t)a->from.dim, DTYPE_F16, 0.0f, 0.0f);
    break;
  case DTYPE_BF16:
    make_wide(wide, row, (size_t)a->from.dim, DTYPE_BF16, 0.0f, 0.0f);
    break;
  default:
    make_wide(wide, row, (size_t)a->from.dim, DTYPE_I8, scale[0], scale[1]);
  }
  size_t pairs = (size_t)a->rotary / 2, at = (size_t)((const int64_t *)a->positions.ptr)[item] * pairs;
  const float *cos = (const float *)a->cos.ptr + at, *sin = (const float *)a->sin.ptr + at;
  if (a->interleaved) {
    turn(wide, cos, sin, pairs, 2, 1);
  } else {
    turn(wide, cos, sin, pairs, 1, pairs);
  }
  return wide;
}

INLINE float round_1(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; } /* half to even, of |x| < 2^22 */
INLINE vf v_round(vf x) { return v_sub(v_add(x, v_set1(0x1.8p23f)), v_set1(0x1.8p23f)); }

/* The least and the most of a row and 0, by lanes. */
INLINE void row_extremes(const void *row, size_t dim, int dtype, vf *least, vf *most) {
  vf low = v_set1(0.0f), high = v_set1(0.0f);
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    vf v = lanes_load(row, i, LANES, dtype, 0.0f, 0.0f, 0.0f);
    low = v_min(v, low);
    high = v_max(v, high);
  }
  if (i < dim) {
    vf v = lanes_load(row, i, dim - i, dtype, 0.0f, 0.0f, 0.0f);
    low = v_min(v, low);
    high = v_max(v, high);
  }
  *least = low;
  *most = high;
}

INLINE vf codes_of(vf x, float scale, float zero) {
  vf whole = v_add(v_round(v_div(x, v_set1(scale))), v_set1(zero));
  return v_min(v_max(whole, v_set1(-128.0f)), v_set1(127.0f));
}

/* Codes, and what they are counted in: scale = (max - min) / 255 over the row and 0, zero the code of 0. */
INLINE void quantise_row(int8_t *codes, float *scale, const void *row, size_t dim, int dtype) {
  vf least, most;
  row_extremes(row, dim, dtype, &least, &most);
  float min = -v_max_across(v_sub(v_set1(0.0f), least));
  double range = (double)v_max_across(most) - (double)min;
  scale[0] = scale[1] = 0.0f;
  if (range < 0x1p-126) {
    memset(codes, 0, dim);
    return;
  }
  const float unit = (float)(range / 255.0);
  const float zero = round_1(-128.0f - min / unit); /* in [-128, 127], since min is in [-range, 0] */
  scale[0] = unit;
  scale[1] = zero;
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    v_store_i8(codes + i, codes_of(lanes_load(row, i, LANES, dtype, 0.0f, 0.0f, 0.0f), unit, zero));
  }
  if (i < dim) {
    lanes_store(codes, i, dim - i, DTYPE_I8,
                codes_of(lanes_load(row, i, dim - i, dtype, 0.0f, 0.0f, 0.0f), unit, zero));
  }
}

INLINE void convert_row(void *to, int to_dtype, const void *row, size_t dim, int dtype, float scale, float zero) {
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    lanes_store(to, i, LANES, to_dtype, lanes_load(row, i, LANES, dtype, scale, zero, 0.0f));
  }
  if (i < dim) {
    lanes_store(to, i, dim - i, to_dtype, lanes_load(row, i, dim - i, dtype, scale, zero, 0.0f));
  }
}

INLINE void narrow_row(void *to, int64_t to_dtype, float *to_scale, const void *row, size_t dim, int dtype, float scale,
                       float zero) {
  switch (to_dtype) {
  case DTYPE_F32:
    convert_row(to, DTYPE_F32, row, dim, dtype, scale, zero);
    break;
  case DTYPE_F16:
    convert_row(to, DTYPE_F16, row, dim, dtype, scale, zero);
    break;
  case DTYPE_BF16:
    convert_row(to, DTYPE_BF16, row, dim, dtype, scale, zero);
    break;
  default:
    if (dtype != DTYPE_I8) { /* codes are moved as they are, or are float32 once turned */
      quantise_row(to, to_scale, row, dim, dtype);
    }
  }
}

static void narrow(void *to, int64_t to_dtype, float *to_scale, const void *row, size_t dim, int64_t dtype,
                   const float *scale) {
  switch (dtype) {
  case DTYPE_F32:
    narrow_row(to, to_dtype, to_scale, row, dim, DTYPE_F32, 0.0f, 0.0f);
    break;
  case DTYPE_F16:
    narrow_row(to, to_dtype, to_scale, row, dim, DTYPE_F16, 0.0f, 0.0f);
    break;
  case DTYPE_BF16:
    narrow_row(to, to_dtype, to_scale, row, dim, DTYPE_BF16, 0.0f, 0.0f);
    break;
  default:
    narrow_row(to, to_dtype, to_scale, row, dim, DTYPE_I8, scale[0], scale[1]);
  }
}

/* ---- rows ---- */

/* Scratch: a row in float32, and two of any dtype, each for at most `cols` elements. */
struct kv_scratch {
  float *wide;
  char *from, *to;
};
INLINE struct kv_scratch kv_scratch_of(const struct kv_args *a, void *scratch) {
  size_t row = ((size_t)a->cols + LANES) * sizeof(float);
  return (struct kv_scratch){scratch, (char *)scratch + row, (char *)scratch + 2 * row};
}

static void move_row(const struct kv_args *a, const struct kv_scratch *s, int64_t item, struct row_place from,
                     struct row_place to) {
  const struct side *f = &a->from, *t = &a->to;
  const void *row = packed_row(f, from.row, s->from);
  void *out = t->chunk == t->dim ? to.row : s->to;
  if (a->rotary) {
    narrow(out, t->dtype, to.scale, turned_row(a, item, s->wide, row, from.scale), (size_t)f->dim, DTYPE_F32, NULL);
  } else {
    narrow(out, t->dtype, to.scale, row, (size_t)f->dim, f->dtype, from.scale);
  }
  if (out != to.row) {
    copy_row(to.row, t->chunk, t->chunk_stride, out, t->dim, 0, t->dim, size_of_element(t->dtype));
  }
}

static void move_bytes(const struct kv_args *a, struct row_place from, struct row_place to) {
  const struct side *f = &a->from, *t = &a->to;
  copy_row(to.row, t->chunk, t->chunk_stride, from.row, f->chunk, f->chunk_stride, f->dim, size_of_element(f->dtype));
  if (from.scale) {
    memcpy(to.scale, from.scale, 2 * sizeof(float));
  }
}

/* Runs of bytes, one a head. Not in line, so that all is in registers: where rows miss the caches, each other store
   takes the place of one that could have been under way (cold rows of 256 bytes: 1.46 times a plain loop before). */
__attribute__((noinline)) static void copy_heads(char *to, int64_t to_step, const char *from, int64_t from_step,
                                                 int64_t count, size_t bytes) {
  for (int64_t i = 0; i < count; i++, to += to_step, from += from_step) {
    copy_lines(to, from, bytes);
  }
}

/* Whether rows are moved as bytes that are adjacent on both sides. */
INLINE int are_runs(const struct kv_args *a) {
  return a->from.dtype == a->to.dtype && !a->rotary && a->from.dtype != DTYPE_I8 && a->from.chunk == a->from.dim &&
         a->to.chunk == a->to.dim;
}

/* Whether the rows of all heads of a token are one on both sides. */
INLINE int heads_adjoin(const struct kv_args *a) {
  int64_t row = a->from.dim * size_of_element(a->from.dtype);
  return are_runs(a) && a->from.head == row && a->to.head == row;
}

/* How many items from i on are one run of bytes with it: the next tokens of a block to the next tokens of a block. */
INLINE int64_t run_from(const struct kv_args *a, int64_t i, int64_t end, int64_t width, struct slot from,
                        struct slot to) {
  int64_t n = 1;
  if (a->from.token != width || a->to.token != width) {
    return 1;
  }
  int64_t from_slot = slot_at(&a->sources, i), to_slot = slot_at(&a->targets, i);
  while (i + n < end && from.token + n < a->from_tokens && to.token + n < a->to_tokens &&
         slot_at(&a->sources, i + n) == from_slot + n && slot_at(&a->targets, i + n) == to_slot + n) {
    n++;
  }
  return n;
}

/* Asks for the rows that item i will write in this layer: scattered, nothing else foresees them. */
INLINE void ask_for_rows(const struct kv_args *a, int64_t layer, int64_t i, int64_t together, int64_t width) {
  int64_t number = slot_at(&a->targets, i);
  if (number < 0 || a->to.chunk != a->to.dim || a->heads / together * width > 8192) {
    return;
  }
  struct slot at = place_in(number, a->to_tokens);
  for (int64_t head = 0; head < a->heads; head += together) {
    const char *row = place_of(&a->dst, &a->dst_scales, &a->to, layer, head, at).row;
    for (int64_t byte = 0; byte < width; byte += 64) {
      prefetch(row + byte);
    }
  }
}

/* Layers are the outer loop: they often are a power of two apart, where a cache has few places for their rows. */
static void move_kv(const struct kv_args *args, void *scratch) {
  const struct kv_args copied = *args, *a = &copied; /* no store can change it, so it stays in registers */
  struct kv_scratch s = kv_scratch_of(a, scratch);
  int as_bytes = a->from.dtype == a->to.dtype && !a->rotary, as_runs = are_runs(a);
  int64_t together = heads_adjoin(a) ? a->heads : 1, end = a->first_row + a->rows, run = 1;
  int64_t width = together * a->from.dim * size_of_element(a->from.dtype);
  for (int64_t layer = 0; layer < a->layers; layer++) {
    for (int64_t i = a->first_row; i < end; i += run) {
      int64_t from_slot = slot_at(&a->sources, i), to_slot = slot_at(&a->targets, i);
      run = 1;
      if (from_slot < 0 || to_slot < 0) {
        continue;
      }
      struct slot from_at = place_in(from_slot, a->from_tokens), to_at = place_in(to_slot, a->to_tokens);
      run = as_runs ? run_from(a, i, end, width, from_at, to_at) : 1;
      if (as_bytes && run == 1 && i + 1 < end) {
        ask_for_rows(a, layer, i + 1, together, width);
      }
      struct row_place from = place_of(&a->src, &a->src_scales, &a->from, layer, 0, from_at);
      struct row_place to = place_of(&a->dst, &a->dst_scales, &a->to, layer, 0, to_at);
      if (as_runs) {
        copy_heads(to.row, together * a->to.head, from.row, together * a->from.head, a->heads / together,
                   (size_t)(width * run));
        continue;
      }
      for (int64_t head = 0; head < a->heads; head++) {
        from = place_of(&a->src, &a->src_scales, &a->from, layer, head, from_at);
        to = place_of(&a->dst, &a->dst_scales, &a->to, layer, head, to_at);
        if (as_bytes) {
          move_bytes(a, from, to);
        } else {
          move_row(a, &s, i, from, to);
        }
      }
    }
  }
}

/* ---- what may not be moved ---- */

INLINE int all_finite(const void *row, size_t dim, int dtype) {
  vf seen = v_set1(0.0f); /* 0 * x is 0, or NaN */
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    seen = v_fma(lanes_load(row, i, LANES, dtype, 0.0f, 0.0f, 0.0f), v_set1(0.0f), seen);
  }
  if (i < dim) {
    seen = v_fma(lanes_load(row, i, dim - i, dtype, 0.0f, 0.0f, 0.0f), v_set1(0.0f), seen);
  }
  return m_bits(v_unord(seen, seen)) == 0;
}

static int may_be_codes(const struct kv_args *a, const struct kv_scratch *s, int64_t item, const void *row,
                        const float *scale) {
  size_t dim = (size_t)a->from.dim;
  if (a->rotary) {
    return all_finite(turned_row(a, item, s->wide, row, scale), dim, DTYPE_F32);
  }
  switch (a->from.dtype) {
  case DTYPE_F32:
    return all_finite(row, dim, DTYPE_F32);
  case DTYPE_F16:
    return all_finite(row, dim, DTYPE_F16);
  default:
    return all_finite(row, dim, DTYPE_BF16);
  }
}

/* A scale is above 0, or 0 with nothing but zeros: what was never written must not read as if it had been. */
static int may_be_scale(const int8_t *codes, size_t dim, const float *scale) {
  if (!(scale[0] >= 0.0f && scale[0] <= FLT_MAX && scale[1] >= -128.0f && scale[1] <= 127.0f)) {
    return 0;
  }
  unsigned any = 0;
  for (size_t i = 0; scale[0] == 0.0f && i < dim; i++) {
    any |= (unsigned)(codes[i] != 0);
  }
  return !any;
}

/* For each item, the first layer * heads + head whose row may not be moved, or -1. */
static void check_kv(const struct kv_args *a, void *scratch) {
  struct kv_scratch s = kv_scratch_of(a, scratch);
  FOR_ROWS (i, a) {
    int64_t *status = (int64_t *)a->status.ptr + i;
    int64_t slot = slot_at(&a->sources, i), n = a->layers * a->heads;
    *status = -1;
    if (slot < 0 || slot_at(&a->targets, i) < 0) {
      continue;
    }
    for (int64_t j = 0; j < n && *status < 0; j++) {
      struct row_place p =
          place_of(&a->src, &a->src_scales, &a->from, j / a->heads, j % a->heads, place_in(slot, a->from_tokens));
      const void *row = packed_row(&a->from, p.row, s.from);
      if ((p.scale && !may_be_scale(row, (size_t)a->from.dim, p.scale)) ||
          (a->to.dtype == DTYPE_I8 && (!p.scale || a->rotary) && !may_be_codes(a, &s, i, row, p.scale))) {
        *status = j;
      }
    }
  }
}

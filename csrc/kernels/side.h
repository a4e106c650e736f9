/* A row of keys or values: where it lies, and what it is as float32.

   A row whose head_dim is in pieces is packed into adjacent elements first; everything else sees such rows only. */

INLINE int64_t size_of_element(int64_t dtype) { return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_I8 ? 1 : 2; }

INLINE int64_t row_offset(const struct side *s, int64_t layer, int64_t block, int64_t head, int64_t token) {
  return layer * s->layer + block * s->block + head * s->head + token * s->token;
}
INLINE int64_t scale_offset(const struct side *s, int64_t layer, int64_t block, int64_t head, int64_t token) {
  return layer * s->scale_layer + block * s->scale_block + head * s->scale_head + token * s->scale_token;
}

INLINE int64_t common_divisor(int64_t a, int64_t b) {
  while (b) {
    int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* `count` pieces of a constant number of bytes: piece i is i / per runs on, and i % per pieces in its run. */
INLINE void copy_some(char *to, int64_t to_run, int64_t to_per, const char *from, int64_t from_run, int64_t from_per,
                      int64_t count, int64_t bytes) {
  int64_t i = 0, j = 0;
  for (int64_t p = 0; p < count; p++) {
    memcpy(to + i * bytes, from + j * bytes, (size_t)bytes);
    if (++i == to_per) {
      i = 0;
      to += to_run;
    }
    if (++j == from_per) {
      j = 0;
      from += from_run;
    }
  }
}

/* A row to where it lies otherwise; chunks are in elements, of one size. */
INLINE void copy_row(char *to, int64_t to_chunk, int64_t to_run, const char *from, int64_t from_chunk, int64_t from_run,
                     int64_t dim, int64_t item) {
  if (to_chunk == dim && from_chunk == dim) {
    copy_lines(to, from, (size_t)(dim * item));
    return;
  }
  int64_t piece = common_divisor(to_chunk, from_chunk), bytes = piece * item;
#define PIECES(size)                                                                                \
  case size:                                                                                        \
    copy_some(to, to_run, to_chunk / piece, from, from_run, from_chunk / piece, dim / piece, size); \
    break
  switch (bytes) {
    PIECES(1);
    PIECES(2);
    PIECES(4);
    PIECES(16);
  default:
    copy_some(to, to_run, to_chunk / piece, from, from_run, from_chunk / piece, dim / piece, bytes);
  }
#undef PIECES
}

/* The row as adjacent elements: in place, or in `packed`, which has room for it. */
INLINE const void *packed_row(const struct side *s, const void *row, void *packed) {
  if (s->chunk == s->dim) {
    return row;
  }
  copy_row(packed, s->dim, 0, row, s->chunk, s->chunk_stride, s->dim, size_of_element(s->dtype));
  return packed;
}

/* Elements i .. i + n - 1, n at most 16, of adjacent ones; an int8 code is what it stands for. */
INLINE vf lanes_load(const void *row, size_t i, size_t n, int dtype, float scale, float zero, float fill) {
  if (dtype != DTYPE_I8) {
    return n >= LANES ? row_load(row, i, dtype) : row_load_n(row, i, n, dtype, fill);
  }
  int8_t tail[LANES] = {0};
  const int8_t *codes = (const int8_t *)row + i;
  if (n < LANES) {
    memcpy(tail, codes, n);
    codes = tail;
  }
  vf v = v_mul(v_set1(scale), v_sub(v_load_i8(codes), v_set1(zero)));
  return n >= LANES ? v : v_select(m_of_bits((1u << n) - 1u), v, v_set1(fill));
}

/* The same lanes out, rounded to nearest, a NaN to the quiet one; int8 codes must be whole and in range. */
INLINE void lanes_store(void *row, size_t i, size_t n, int dtype, vf v) {
  if (dtype == DTYPE_I8) {
    int8_t tail[LANES], *codes = (int8_t *)row + i;
    v_store_i8(n >= LANES ? codes : tail, v);
    if (n < LANES) {
      memcpy(codes, tail, n);
    }
    return;
  }
  v = v_select(v_unord(v, v), QUIET_NAN, v);
  if (dtype == DTYPE_F32) {
    store_upto(row, i, i + (n >= LANES ? LANES : n), v);
    return;
  }
  uint16_t tail[LANES], *halves = (uint16_t *)row + i;
  uint16_t *to = n >= LANES ? halves : tail;
  if (dtype == DTYPE_F16) {
    v_store_f16(to, v);
  } else {
    v_store_bf16(to, v);
  }
  if (n < LANES) {
    memcpy(halves, tail, n * sizeof *tail);
  }
}

/* The floors the bench divides by: the least that reading a row, reading it with an exp, or copying it can cost. */

INLINE void read_max_rows(const struct row_args *a, void *scratch, int dtype) {
  (void)scratch;
  FOR_ROWS (r, a) {
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    size_t n = (size_t)a->cols, i = 0;
    vf acc[8], v[4];
    for (int j = 0; j < 8; j++) {
      acc[j] = v_set1(-INFINITY);
    }
    for (; i + 128 <= n; i += 128) {
      for (size_t j = 0; j < 8; j++) {
        acc[j] = v_max(row_load(x, i + LANES * j, dtype), acc[j]);
      }
    }
    for (; i < n; i += 64) {
      row_load64(v, x, i, n, dtype, -INFINITY);
      for (size_t j = 0; j < 4; j++) {
        acc[j] = v_max(v[j], acc[j]);
      }
    }
    for (size_t j = 0; j < 4; j++) {
      acc[j] = v_max(acc[j], acc[j + 4]);
    }
    *(float *)((char *)a->out.ptr + a->out_stride * r) = max_across64(acc);
  }
}

/* A max pass, then a pass of v_exp and a sum: no blocks, no NaN test, nothing a result would need. */
INLINE void read_exp_rows(const struct row_args *a, void *scratch, int dtype) {
  read_max_rows(a, scratch, dtype);
  FOR_ROWS (r, a) {
    float *out = (float *)((char *)a->out.ptr + a->out_stride * r);
    *out = block_exp_sum(row_of(a->x.ptr, a->x_stride, r), 0, (size_t)a->cols, dtype, *out, 1.0f, NULL);
  }
}

static void read_max(const struct row_args *a, void *scratch) { FOR_DTYPE(read_max_rows, a, scratch) }
static void read_exp(const struct row_args *a, void *scratch) { FOR_DTYPE(read_exp_rows, a, scratch) }
static void copy(const struct row_args *a, void *scratch) {
  (void)scratch;
  size_t bytes = (size_t)a->cols * dtype_size(a->dtype);
  FOR_ROWS (r, a) {
    memcpy((char *)a->out.ptr + a->out_stride * r, row_of(a->x.ptr, a->x_stride, r), bytes);
  }
}

/* Blocks one after another as the ids have them, through the caches and around them: no runs, no order, one layer. */
static void copy_each(const struct move_args *a, void *scratch) {
  (void)scratch;
  FOR_ROWS (r, a) {
    memcpy((char *)a->dst.ptr + id_of(&a->targets, r) * a->dst_block,
           (const char *)a->src.ptr + id_of(&a->sources, r) * a->src_block, (size_t)a->bytes);
  }
}
static void stream_each(const struct move_args *a, void *scratch) {
  (void)scratch;
  FOR_ROWS (r, a) {
    if (r + 1 < a->first_row + a->rows) {
      prefetch_head((const char *)a->src.ptr + id_of(&a->sources, r + 1) * a->src_block, (size_t)a->bytes);
    }
    stream_copy((char *)a->dst.ptr + id_of(&a->targets, r) * a->dst_block,
                (const char *)a->src.ptr + id_of(&a->sources, r) * a->src_block, (size_t)a->bytes);
  }
  lines_streamed();
}
static void stream_zeros(const struct move_args *a, void *scratch) {
  (void)scratch;
  stream_zero(a->dst.ptr, (size_t)a->dst.bytes);
  lines_streamed();
}

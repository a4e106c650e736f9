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
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    *out = block_exp_sum(x, 0, (size_t)a->cols, dtype, *out, 1.0f, NULL, x);
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

/* Reads what a row of keys or values has, asking for one that comes later. */
INLINE void xor_row(vu acc[4], bytes row, size_t size, bytes later) {
  for (size_t i = 0; i + 64 <= size; i += 64) {
    prefetch_far(later + i);
    acc[i / 64 % 4] = u_xor(acc[i / 64 % 4], u_load((const uint32_t *)(const void *)(row + i)));
  }
}

/* The keys and values that attend's tasks meet, block by block through the table, read and nothing else, each block
   asked for while the one before is read: out has 16 words a task. Rows are multiples of 64 bytes. */
static void scan_kv(const struct attend_args *a, void *scratch) {
  (void)scratch;
  const struct side *sides[2] = {&a->key, &a->value};
  FOR_ROWS (i, a) {
    const struct attend_task *task = (const struct attend_task *)a->tasks.ptr + i;
    const struct attend_query *last =
        (const struct attend_query *)a->queries.ptr + task->first_query + task->queries - 1;
    const int64_t *blocks = (const int64_t *)a->table.ptr + task->table_row * a->table_stride;
    const int64_t first = task->first_chunk * ATTEND_CHUNK, end = least(task->end_chunk * ATTEND_CHUNK, last->hi);
    vu acc[4] = {u_set1(0), u_set1(0), u_set1(0), u_set1(0)};
    for (int64_t key = first; key < end;) {
      const int64_t stop = least(end, (key / a->block_size + 1) * a->block_size);
      for (int side = 0; side < 2; side++) {
        const struct side *s = sides[side];
        bytes base = (bytes)(side ? a->v.ptr : a->k.ptr) + task->kv_head * s->head;
        bytes row = base + blocks[key / a->block_size] * s->block + key % a->block_size * s->token;
        bytes later = stop < end ? base + blocks[stop / a->block_size] * s->block : row;
        for (int64_t token = key; token < stop; token++, row += s->token, later += s->token) {
          xor_row(acc, row, (size_t)(s->dim * size_of_element(s->dtype)), later);
        }
      }
      key = stop;
    }
    u_store((uint32_t *)a->out.ptr + i * LANES, u_xor(u_xor(acc[0], acc[1]), u_xor(acc[2], acc[3])));
  }
}

/* `cols` times seven vectors multiplied and added to, as many as an ISA of sixteen half vectors can hold, each waiting
   for nothing but itself. They begin as x has them: of equal ones the compiler would make one. */
static void multiply(const struct row_args *a, void *scratch) {
  (void)scratch;
  FOR_ROWS (r, a) {
    const float *begin = row_of(a->x.ptr, a->x_stride, r);
    const vf c = v_set1(0.5f);
    vf x[7];
    for (int j = 0; j < 7; j++) {
      x[j] = v_load(begin + j * LANES);
    }
    for (int64_t i = 0; i < a->cols; i++) {
      for (int j = 0; j < 7; j++) {
        x[j] = v_fma(x[j], c, c);
      }
    }
    vf sum = x[0];
    for (int j = 1; j < 7; j++) {
      sum = v_add(sum, x[j]);
    }
    *(float *)((char *)a->out.ptr + a->out_stride * r) = v_sum_across(sum);
  }
}

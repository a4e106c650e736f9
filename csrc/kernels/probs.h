/* sample_from_probs: ids of a row of probabilities, which need not sum to 1. The scores are log p_i + G_i, with the
   noise of sample; what has p_i = 0, of either sign, is never drawn. Block maxima bound the scores as they do there, so
   few logarithms are taken. With u it is the inverse CDF in id order, on weights round(2^43 p_i / p_max).
   A row with a NaN, a negative or +inf in it, or nothing above 0, is invalid. */

static const struct prefix positive = {0x1p-149f, SAMPLE_MAX_VOCAB};

INLINE void find_probs_maxima_as(const struct maxima_args *a, void *scratch, int dtype) {
  (void)scratch;
  maxima_of(a->row->maxima, a->row->x, a->row->n, dtype, 1, a->has_nan);
}

static int judge_probs(struct judged *j, const struct probs_args *a, int64_t row, char **scratch) {
  int unfit = 0;
  *j = plain_row(row_of(a->x.ptr, a->x_stride, row), (size_t)a->cols, a->dtype, NULL);
  j->maxima = (float *)take(scratch, (j->blocks + LANES) * sizeof *j->maxima);
  const struct maxima_args args = {j, j->dtype, &unfit};
  FOR_DTYPE(find_probs_maxima_as, &args, NULL)
  j->max = block_max(j->maxima, 0, j->blocks, DTYPE_F32, &unfit);
  return !unfit && j->max > 0.0f && j->max < INFINITY;
}

/* p / p_max of a block, 0 beyond the row. */
static void shares_of(vf share[4], const struct judged *j, size_t block) {
  float room[BLOCK];
  const float *p = block_of(j, block, room);
  for (size_t i = 0; i < 4; i++) {
    share[i] = v_div(v_max(v_load(p + LANES * i), v_set1(0.0f)), v_set1(j->max));
  }
}

/* The first id at which the running weight exceeds floor(u * total), as it does at the latest with the last weight. The
   bounds beside that are for a row that changes meanwhile. */
static size_t inverse_cdf_of_probs(const struct judged *j, double u, char *scratch) {
  uint64_t *up_to = (uint64_t *)take(&scratch, j->blocks * sizeof *up_to), running = 0, w[BLOCK];
  vf share[4];
  for (size_t b = 0; b < j->blocks; b++) {
    vw acc = w_zero();
    shares_of(share, j, b);
    for (size_t i = 0; i < 4; i++) {
      acc = w_add(acc, share[i]);
    }
    up_to[b] = running += w_total(acc);
  }
  uint64_t target = times_weight(u, running, 0);
  size_t block = 0, i = 0;
  while (block + 1 < j->blocks && up_to[block] <= target) {
    block++;
  }
  shares_of(share, j, block);
  for (size_t v = 0; v < 4; v++) {
    w_store(w + LANES * v, share[v]);
  }
  for (running = (block ? up_to[block - 1] : 0) + w[0]; i + 1 < BLOCK && running <= target; running += w[i]) {
    i++;
  }
  return min_size(block * BLOCK + i, j->n - 1);
}

static void draw_from_probs(int64_t *ids, const struct probs_args *a, int64_t row, char *scratch) {
  const struct philox_key key = key_of(&a->params, row);
  size_t n = (size_t)a->n;
  struct winners drawn = {NULL, 0, n};
  struct judged j;
  if (!judge_probs(&j, a, row, &scratch)) {
    put_drawn(ids, n, &drawn);
  } else if (a->has_u) {
    *ids = (int64_t)inverse_cdf_of_probs(&j, ((const struct sample_params *)a->params.ptr)[row].u, scratch);
  } else if (n == 1) {
    size_t id = gumbel_argmax(&j, positive, OF_PROBS, &key).id;
    *ids = id < j.n ? (int64_t)id : -1; /* a row that changes meanwhile may leave nobody */
  } else {
    drawn.heap = (struct winner *)take(&scratch, n * sizeof *drawn.heap);
    gumbel_best(&j, positive, OF_PROBS, &key, &drawn);
    put_in_order(&drawn);
    put_drawn(ids, n, &drawn);
  }
}

static void sample_from_probs(const struct probs_args *a, void *scratch) {
  FOR_ROWS (r, a) {
    draw_from_probs((int64_t *)a->ids.ptr + r * a->n, a, r, scratch);
  }
}

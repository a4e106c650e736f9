/* A row written out as it is judged and truncated whole: what a draw is made from where the lazy way (sample.h) will
   not do. At temperature 0 it is not truncated. */

/* 0 if nothing can be chosen from the row. */
static int write_whole(struct row_state *s, const struct sample_args *a, int64_t row, char *scratch) {
  const struct sample_params *p = (const struct sample_params *)a->params.ptr + row;
  size_t n = (size_t)a->cols, blocks = (n + BLOCK - 1) / BLOCK;
  int has_nan = 0;
  *s = (struct row_state){.n = n, .inverse = 1.0f, .force_exact = a->force_exact != 0};
  s->temperature = at_most_1e30(p->temperature);
  s->z = (float *)take(&scratch, (blocks + 1) * BLOCK * sizeof *s->z);
  s->maxima = (float *)take(&scratch, (blocks + LANES) * sizeof *s->maxima);
  uint32_t *counts = (uint32_t *)take(&scratch, n * sizeof *counts);
  s->scratch = scratch;
  write_edited(s->z, counts, a, row);
  s->max = block_max(s->z, 0, n, DTYPE_F32, &has_nan);
  if (has_nan || s->max == -INFINITY || s->max == INFINITY) {
    return 0;
  }
  if (!is_greedy(s->temperature)) {
    truncate(s, a, p);
  }
  return 1;
}

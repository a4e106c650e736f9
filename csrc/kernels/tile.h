/* draw_tile: a part of a row, drawn from with the noise that its ids have in the whole: the best score and its id. The
   row's token is the id of the best of all tiles. -1 is the id, and -inf the score, of a tile with nothing above -inf;
   a NaN the score of one that makes a row invalid. At temperature 0 a score is the logit. */

/* The tile in scratch as part of a row that begins at id 0: what is before the tile is -inf to its block maxima, and
   so never looked at. */
static int lay_out(struct judged *j, const struct tile_args *a, char *scratch) {
  size_t end = (size_t)a->cols, first = (size_t)a->first, before = first / BLOCK, head = first % BLOCK;
  size_t n = end - before * BLOCK;
  float *z = (float *)take(&scratch, (n + 2 * BLOCK) * sizeof *z);
  int has_nan = 0;
  fill(z, BLOCK, -INFINITY);
  write_out(z + head, a->x.ptr, n - head, a->dtype);
  *j = plain_row((const void *)((uintptr_t)z - before * BLOCK * sizeof *z), end, DTYPE_F32, (float *)scratch);
  fill(j->maxima, before, -INFINITY);
  block_maxima(j->maxima + before, z, n, DTYPE_F32, &has_nan);
  j->max = block_max(j->maxima, before, j->blocks, DTYPE_F32, &has_nan);
  return !has_nan && j->max < INFINITY;
}

static struct winner best_of_tile(const struct judged *j, double temperature, const struct philox_key *key) {
  if (is_greedy(temperature)) {
    return (struct winner){(double)j->max, 0.0, first_maximum(j), j->max};
  }
  return gumbel_argmax(j, everything, at_most_1e30(temperature), key);
}

static void draw_tile(const struct tile_args *a, void *scratch) {
  const struct philox_key key = {a->seed, a->key, (uint32_t)a->step};
  struct judged j;
  int valid = lay_out(&j, a, scratch), any = valid && j.max > -INFINITY;
  struct winner best = any ? best_of_tile(&j, a->temperature, &key) : (struct winner){-INFINITY, 0.0, 0, 0.0f};
  ((double *)a->score.ptr)[0] = valid ? best.hi : (double)NAN;
  ((double *)a->score.ptr)[1] = best.lo;
  *(int64_t *)a->token.ptr = any ? (int64_t)best.id : -1;
}

/* More of a draw than its token: the n best scores, which are n ids drawn without replacement (Kool, van Hoof & Welling
   2019), and the margin by which an id won. At temperature 0 a score is the logit, and nothing is truncated. The
   prefix that truncations leave is known before the draw, here, by sample's means. */

/* What a row's ids are drawn from. */
struct drawn_from {
  struct judged row;
  struct prefix kept;
  double temperature;
};

/* The prefix that is left of a row where it lies. 0 if it takes the whole row to know. */
static int know_prefix(struct drawn_from *d, const struct sample_args *a, const struct sample_params *p,
                       char *scratch) {
  size_t k = few_first(a, p, d->row.n);
  if (is_greedy(d->temperature)) {
    d->kept = everything;
    return 1;
  }
  struct few few;
  char *behind = scratch;
  if (k && pick_all_few(&few, &d->row, a, k, &behind)) {
    truncate_few(&few, a, p, d->temperature);
    d->kept = last_of(&few.list);
    return 1;
  }
  struct left left = what_is_left(&d->row, a, p, d->temperature, scratch);
  if (left.rank) {
    return 0;
  }
  d->kept = all_left(&left, &d->row, (float)(1.0 / d->temperature), scratch).prefix;
  return 1;
}

/* 0 if nothing can be chosen from the row. */
static int draw_from(struct drawn_from *d, const struct sample_args *a, int64_t row, char **scratch) {
  const struct sample_params *p = (const struct sample_params *)a->params.ptr + row;
  char *start = *scratch;
  struct row_state s;
  d->temperature = at_most_1e30(p->temperature);
  if (!a->force_exact) {
    if (!judge(&d->row, a, row, scratch)) {
      return 0;
    }
    if (know_prefix(d, a, p, *scratch)) {
      return 1;
    }
  }
  if (!write_whole(&s, a, row, start)) {
    return 0;
  }
  *scratch = s.scratch;
  d->row = row_of_state(&s);
  d->kept = everything;
  return 1;
}

static void enter_logits(struct winners *all, const struct judged *row) {
  struct winner to_beat = {-INFINITY, 0.0, row->n, -INFINITY};
  for (size_t b = 0; b < row->blocks; b++) {
    float room[BLOCK];
    const float *z = (double)row->maxima[b] >= to_beat.hi ? block_of(row, b, room) : NULL;
    for (size_t i = 0; z && i < BLOCK; i++) {
      struct winner w = {(double)z[i], 0.0, b * BLOCK + i, z[i]};
      if (z[i] > -INFINITY && beats(w, to_beat)) {
        to_beat = enter(all, w, to_beat);
      }
    }
  }
}

/* The n best, best first; fewer if not so many are left. */
static struct winners best_of(const struct drawn_from *d, size_t n, const struct philox_key *key, char *scratch) {
  struct winners all = {(struct winner *)take(&scratch, n * sizeof *all.heap), 0, n};
  if (is_greedy(d->temperature)) {
    enter_logits(&all, &d->row);
  } else {
    gumbel_best(&d->row, d->kept, d->temperature, key, &all);
  }
  put_in_order(&all);
  return all;
}

/* In the order of drawing; -1 where there is nothing left to draw. */
static void put_drawn(int64_t *ids, size_t n, const struct winners *drawn) {
  for (size_t i = 0; i < n; i++) {
    ids[i] = i < drawn->count ? (int64_t)drawn->heap[i].id : -1;
  }
}

static void sample_n(const struct sample_args *a, void *scratch) {
  size_t n = (size_t)a->n;
  FOR_ROWS (r, a) {
    const struct philox_key key = key_of(&a->params, r);
    struct drawn_from from;
    struct winners drawn = {NULL, 0, n};
    char *rest = scratch;
    if (draw_from(&from, a, r, &rest)) {
      drawn = best_of(&from, n, &key, rest);
    }
    put_drawn((int64_t *)a->tokens.ptr + (size_t)r * n, n, &drawn);
  }
}

static float logit_of(const struct judged *row, size_t id) {
  float room[BLOCK];
  return block_of(row, id / BLOCK, room)[id % BLOCK];
}

/* The score of `token` less the best of the others': infinite if there are none, or if it is not left itself. */
static double margin_of(const struct drawn_from *d, uint32_t token, const struct philox_key *key, char *scratch) {
  float z = logit_of(&d->row, token);
  if (z == -INFINITY || !is_in(d->kept, z, token)) {
    return -INFINITY;
  }
  struct winners two = best_of(d, 2, key, scratch);
  int won = two.heap[0].id == token;
  if (won && two.count == 1) {
    return INFINITY;
  }
  struct winner own = {(double)z, 0.0, token, z}, other = two.heap[won];
  if (!is_greedy(d->temperature)) {
    own = best_of_few(&z, &token, 1, d->temperature, key);
  }
  return (own.hi - other.hi) + (own.lo - other.lo);
}

static void verify(const struct sample_args *a, void *scratch) {
  FOR_ROWS (r, a) {
    const struct philox_key key = key_of(&a->params, r);
    const int64_t *token = (const int64_t *)a->tokens.ptr + r;
    struct drawn_from from;
    char *rest = scratch;
    int valid = draw_from(&from, a, r, &rest);
    ((double *)a->margins.ptr)[r] = valid ? margin_of(&from, (uint32_t)*token, &key, rest) : (double)NAN;
  }
}

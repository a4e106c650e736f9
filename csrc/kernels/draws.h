/* More of a draw than its token: the n best scores, which are n ids drawn without replacement (Kool, van Hoof & Welling
   2019), and the margin by which an id won. At temperature 0 a score is the logit, and nothing is truncated. Rows are
   written out and truncated whole, so both are of exactly what sample draws from. */

static void enter_logits(struct winners *all, const struct row_state *s) {
  struct winner to_beat = {-INFINITY, 0.0, s->n, -INFINITY};
  for (size_t i = 0; i < s->n; i++) {
    struct winner w = {(double)s->z[i], 0.0, i, s->z[i]};
    if (beats(w, to_beat) && s->z[i] > -INFINITY) {
      to_beat = enter(all, w, to_beat);
    }
  }
}

/* The n best of what is left of the row, best first; fewer if there are not so many. */
static struct winners best_of_row(struct row_state *s, size_t n, const struct philox_key *key) {
  char *scratch = s->scratch;
  struct winners all = {(struct winner *)take(&scratch, n * sizeof *all.heap), 0, n};
  if (is_greedy(s)) {
    enter_logits(&all, s);
  } else {
    struct judged row = plain_row(s->z, s->n, DTYPE_F32, s->maxima);
    int has_nan = 0;
    find_maxima(&row, &has_nan);
    gumbel_best(&row, everything, s->temperature, key, &all);
  }
  put_in_order(&all);
  return all;
}

INLINE struct philox_key key_of(const struct span *params, int64_t row) {
  const struct sample_params *p = (const struct sample_params *)params->ptr + row;
  return (struct philox_key){p->seed, p->key, (uint32_t)p->step};
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
    struct row_state s;
    struct winners drawn = {NULL, 0, n};
    if (write_whole(&s, a, r, scratch)) {
      drawn = best_of_row(&s, n, &key);
    }
    put_drawn((int64_t *)a->tokens.ptr + (size_t)r * n, n, &drawn);
  }
}

static struct winner score_of(const struct row_state *s, uint32_t id, const struct philox_key *key) {
  const float *z = s->z + id;
  return is_greedy(s) ? (struct winner){(double)*z, 0.0, id, *z} : best_of_few(z, &id, 1, s->temperature, key);
}

/* The score of `token` less the best of the others': infinite if there are none, or if it is not left itself. */
static double margin_of(struct row_state *s, size_t token, const struct philox_key *key) {
  if (s->z[token] == -INFINITY) {
    return -INFINITY;
  }
  struct winners two = best_of_row(s, 2, key);
  int won = two.heap[0].id == token;
  if (won && two.count == 1) {
    return INFINITY;
  }
  struct winner own = score_of(s, (uint32_t)token, key), other = two.heap[won];
  return (own.hi - other.hi) + (own.lo - other.lo);
}

static void verify(const struct sample_args *a, void *scratch) {
  FOR_ROWS (r, a) {
    const struct philox_key key = key_of(&a->params, r);
    struct row_state s;
    size_t token = (size_t)((const int64_t *)a->tokens.ptr)[r];
    ((double *)a->margins.ptr)[r] = write_whole(&s, a, r, scratch) ? margin_of(&s, token, &key) : (double)NAN;
  }
}

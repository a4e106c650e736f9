/* sample: one token a row, decided on integers and exact sums (docs/determinism.md).

   The token is the Gumbel argmax over what the truncations leave or, when u is given, the inverse CDF on the integer
   weights in id order. There are two ways to it. The exact one writes the row out and truncates it whole (truncate.h):
   it serves u, and every row when it is forced. The other never has the whole: it looks at the row through its blocks'
   maxima (judged.h) and either picks the few that top-k leaves (few.h), or draws first and then asks whether the winner
   was left; if not, what comes before it in order is drawn from again, with the same noise. A truncation leaves a
   prefix of that order, and noise belongs to the id, so the first winner that is left is the winner over all that is.
 */

/* What is told of a row's kept: ids, ascending, and their logprobs, renormalised by the weight that is kept. */
struct support {
  int64_t *ids;
  float *logprobs;
  int64_t *count; /* so far */
  float max, inverse;
  double log_weight;
};

static struct support support_of(const struct sample_args *a, int64_t row, float max, float inverse, uint64_t weight) {
  int64_t *count = (int64_t *)a->support_counts.ptr + row;
  *count = 0;
  return (struct support){(int64_t *)a->support_ids.ptr + row * a->cols,
                          (float *)a->support_logprobs.ptr + row * a->cols,
                          count,
                          max,
                          inverse,
                          log64_1((double)weight) - WEIGHT_BITS * 6.93147180559945286227e-01};
}

/* Copies, since no store can change them: the loops become vectors. */
static void put_more(struct support s, struct list kept) {
  int64_t *ids = s.ids + *s.count;
  float *logprobs = s.logprobs + *s.count;
  for (size_t i = 0; i < kept.count; i++) {
    ids[i] = kept.id[i];
  }
  for (size_t i = 0; i < kept.count; i++) {
    logprobs[i] = (float)((double)((kept.value[i] + 0.0f - s.max) * s.inverse) - s.log_weight);
  }
  *s.count += (int64_t)kept.count;
}

static void put_support(const struct sample_args *a, int64_t row, const struct list *kept, float max, float inverse,
                        uint64_t weight) {
  put_more(support_of(a, row, max, inverse, weight), *kept);
}

/* ---- the exact way ---- */

static void put_whole_support(struct row_state *s, const struct sample_args *a, int64_t row) {
  char *scratch = s->scratch;
  struct list kept = list_in(&scratch, s->n);
  for (size_t i = 0; i < s->n; i += LANES) { /* z is padded with -inf */
    vf v = v_load(s->z + i);
    append(&kept, v, ids_from(i), v_gt(v, v_set1(-INFINITY)));
  }
  put_support(a, row, &kept, s->max, s->inverse, total_weight(s));
}

static size_t draw_whole(struct row_state *s, const struct sample_params *p, int64_t has_u,
                         const struct philox_key *key) {
  if (has_u) {
    return inverse_cdf(s, p->u);
  }
  const struct judged row = row_of_state(s);
  return gumbel_argmax(&row, everything, s->temperature, key).id;
}

static void put_only(const struct sample_args *a, int64_t row, float max, size_t token) {
  if (a->support_ids.ptr) {
    struct list only = {&max, &(uint32_t){(uint32_t)token}, 1};
    put_support(a, row, &only, max, 1.0f, (uint64_t)1 << WEIGHT_BITS);
  }
}

static int64_t sample_whole(const struct sample_args *a, const struct sample_params *p, int64_t row,
                            const struct philox_key *key, char *scratch) {
  struct row_state s;
  if (!write_whole(&s, a, row, scratch)) {
    return -1;
  }
  if (is_greedy(s.temperature)) {
    size_t token = first_equal(s.z, s.n, DTYPE_F32, s.max);
    put_only(a, row, s.max, token);
    return (int64_t)token;
  }
  if (a->support_ids.ptr) {
    put_whole_support(&s, a, row);
  }
  return (int64_t)draw_whole(&s, p, a->has_u, key);
}

/* ---- the lazy way ---- */

/* What the steps leave, as far as it is known before a draw. */
struct left {
  struct prefix known;
  struct nucleus nucleus; /* asked about winners if top_p is below 1 */
  size_t rank;            /* what comes before a winner must be fewer, if not 0 */
  int rank_ties, wanted;  /* equals of a winner do not come before it; the ids are asked for, not only a draw */
};

static void leave_top_k(struct left *l, const struct judged *j, const struct sample_params *p, char *scratch) {
  size_t k = top_k_of(p, j->n);
  if (k > j->blocks && p->top_p >= 1.0 &&
      !l->wanted) { /* counting what comes before winners is cheaper than finding them all */
    l->rank = k;
    return;
  }
  struct prefix kept = first_prefix(j, k, scratch);
  kept.end = l->rank_ties ? j->n : kept.end;
  l->known = shorter(l->known, kept);
}

static void leave_min_p(struct left *l, const struct judged *j, const struct sample_params *p, double temperature,
                        char *scratch) {
  struct prefix kept = {min_p_bound(p->min_p, j->max, temperature), j->n};
  size_t least = min_size((size_t)p->min_keep, j->n);
  if (least > 1) {
    kept = longer(kept, first_prefix(j, least, scratch));
  }
  l->known = shorter(l->known, kept);
}

static struct left what_is_left(const struct judged *j, const struct sample_args *a, const struct sample_params *p,
                                double temperature, char *scratch) {
  double current = 1.0;
  struct left l = {.known = everything,
                   .nucleus.top_p = 1.0,
                   .rank_ties = (a->ties_all & TIES_TOP_K) != 0,
                   .wanted = a->support_ids.ptr != NULL};
  for (int i = 0; i < STEP_LIMIT && a->steps[i]; i++) {
    if (a->steps[i] == STEP_TEMPERATURE) {
      current = temperature;
    } else if (a->steps[i] == STEP_TOP_K && top_k_of(p, j->n)) {
      leave_top_k(&l, j, p, scratch);
    } else if (a->steps[i] == STEP_MIN_P && p->min_p > 0.0) {
      leave_min_p(&l, j, p, current, scratch);
    } else if (a->steps[i] == STEP_TOP_P && p->top_p < 1.0) {
      l.nucleus = whole_nucleus(j, (float)(1.0 / current), p->top_p);
      l.nucleus.of = l.known;
      l.nucleus.min_keep = (size_t)p->min_keep;
      l.nucleus.ties_all = (a->ties_all & TIES_TOP_P) != 0;
    }
  }
  return l;
}

static int is_left(struct left *l, const struct judged *j, struct winner w) {
  if (l->rank && count_in(j, (struct prefix){w.z, l->rank_ties ? 0 : w.id}) >= l->rank) {
    return 0;
  }
  return l->nucleus.top_p >= 1.0 || is_in_nucleus(&l->nucleus, w);
}

/* What blocks from..end have in p, behind what the list has. */
static struct list gather_more(struct list list, const struct judged *j, struct prefix p, size_t from, size_t end) {
  const struct cut cut = cut_of(p);
  for (size_t b = from; b < end; b++) {
    if (has_part(j, b, p)) {
      float room[BLOCK];
      const float *z = block_of(j, b, room);
      for (size_t i = 0; i < BLOCK; i += LANES) {
        vf v = v_load(z + i);
        append(&list, v, ids_from(b * BLOCK + i), is_kept(&cut, b * BLOCK + i, v));
      }
    }
  }
  return list;
}

/* What is in p, in id order. */
static struct list gather(const struct judged *j, struct prefix p, char **scratch) {
  return gather_more(list_in(scratch, j->n), j, p, 0, j->blocks);
}

/* The nucleus of what l->nucleus is of: nothing else weighs. */
static struct weighed nucleus_of_left(struct nucleus *n, char *scratch) {
  const struct judged *j = n->row;
  const struct measure how = {j->max, n->inverse};
  struct weighed kept;
  if (ends_early(n, &kept, scratch)) {
    return kept;
  }
  if (j->dtype == DTYPE_F32 && j->mask.kind == MASK_NONE && !j->is_edited && !is_longer(everything, n->of)) {
    return kept_by_mass(j->x, j->n, how, n->top_p, scratch);
  }
  const struct cut cut = cut_of(n->of);
  float *z = (float *)take(&scratch, j->blocks * BLOCK * sizeof *z);
  for (size_t b = 0; b < j->blocks; b++) {
    float room[BLOCK];
    const float *from = block_of(j, b, room);
    for (size_t i = 0; i < BLOCK; i += LANES) {
      vf v = v_load(from + i);
      v_store(z + b * BLOCK + i, v_select(is_kept(&cut, b * BLOCK + i, v), v, v_set1(-INFINITY)));
    }
  }
  return kept_by_mass(z, j->n, how, n->top_p, scratch);
}

/* All that is left; its weight only if it is known without weighing it, else 0. */
static struct weighed all_left(struct left *l, const struct judged *j, float inverse, char *scratch) {
  if (l->nucleus.top_p >= 1.0) {
    return (struct weighed){l->known, 0};
  }
  struct weighed nucleus = nucleus_of_left(&l->nucleus, scratch);
  struct prefix kept = nucleus.prefix;
  kept.end = l->nucleus.ties_all ? j->n : kept.end;
  if (l->nucleus.min_keep > 1) {
    kept = longer(kept, first_prefix(j, min_size(l->nucleus.min_keep, j->n), scratch));
  }
  kept = shorter(l->known, kept);
  int same = kept.value == nucleus.prefix.value && kept.end == nucleus.prefix.end && inverse == l->nucleus.inverse;
  return (struct weighed){kept, same ? nucleus.weight : 0};
}

enum { AT_ONCE = 32 }; /* blocks */

static size_t draw_from_all_left(struct left *l, const struct judged *j, const struct sample_args *a, int64_t row,
                                 double temperature, const struct philox_key *key, char *scratch) {
  float inverse = (float)(1.0 / temperature);
  struct weighed kept = all_left(l, j, inverse, scratch);
  uint64_t weight = kept.weight ? kept.weight : exact_mass(j, kept.prefix, inverse);
  const struct support s = support_of(a, row, j->max, inverse, weight);
  const struct list none = list_in(&scratch, AT_ONCE * BLOCK);
  for (size_t b = 0; b < j->blocks; b += AT_ONCE) { /* a list of all would leave the caches before it is put */
    put_more(s, gather_more(none, j, kept.prefix, b, min_size(b + AT_ONCE, j->blocks)));
  }
  return gumbel_argmax(j, kept.prefix, temperature, key).id;
}

static size_t draw_left(struct left *l, const struct judged *j, double temperature, const struct philox_key *key) {
  struct winner w = gumbel_argmax(j, l->known, temperature, key);
  while (w.id < j->n && !is_left(l, j, w)) {
    l->known = (struct prefix){w.z, w.id};
    w = gumbel_argmax(j, l->known, temperature, key);
  }
  return w.id;
}

static size_t first_maximum(const struct judged *j) {
  size_t block = first_equal(j->maxima, j->blocks, DTYPE_F32, j->max);
  float room[BLOCK];
  return block * BLOCK + first_equal(block_of(j, block, room), BLOCK, DTYPE_F32, j->max);
}

static size_t sample_few(struct few *f, const struct judged *j, const struct sample_args *a,
                         const struct sample_params *p, int64_t row, double temperature, const struct philox_key *key,
                         char *scratch) {
  truncate_few(f, a, p, temperature);
  if (a->support_ids.ptr) {
    const struct list kept = gather(j, last_of(&f->list), &scratch);
    put_support(a, row, &kept, f->max, f->inverse, weigh_few(f));
  }
  return draw_few(f, j, temperature, key);
}

/* likely: an id that may well be the token, so that a draw begins there; or below 0 */
static int64_t sample_near(const struct sample_args *a, int64_t row, int64_t likely, char *scratch) {
  const struct sample_params *p = (const struct sample_params *)a->params.ptr + row;
  const struct philox_key key = key_of(&a->params, row);
  double temperature = at_most_1e30(p->temperature);
  int greedy = is_greedy(temperature);
  size_t few = few_first(a, p, (size_t)a->cols);
  if (a->force_exact || a->has_u) {
    return sample_whole(a, p, row, &key, scratch);
  }
  struct judged j;
  char *rest = scratch;
  if (!judge(&j, a, row, &rest)) {
    return -1;
  }
  if (greedy) {
    size_t token = first_maximum(&j);
    put_only(a, row, j.max, token);
    return (int64_t)token;
  }
  j.likely = likely;
  struct few f;
  char *behind = rest;
  if (few && pick_all_few(&f, &j, a, few, &behind)) {
    return (int64_t)sample_few(&f, &j, a, p, row, temperature, &key, behind);
  }
  struct left left = what_is_left(&j, a, p, temperature, rest);
  return (int64_t)(left.wanted ? draw_from_all_left(&left, &j, a, row, temperature, &key, rest)
                               : draw_left(&left, &j, temperature, &key));
}

static int64_t sample_row(const struct sample_args *a, int64_t row, char *scratch) {
  return sample_near(a, row, -1, scratch);
}

static void sample(const struct sample_args *a, void *scratch) {
  int64_t *tokens = a->tokens.ptr, *counts = a->support_counts.ptr;
  FOR_ROWS (r, a) {
    if (counts) {
      counts[r] = 0;
    }
    int64_t token = sample_row(a, r, scratch);
    tokens[r] = token < a->cols ? token : -1; /* a row that changes meanwhile may leave nobody */
  }
}

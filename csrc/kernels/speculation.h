/* verify_draft: how much of a draft the target goes on with, and the token that follows it.

   p is the target's law at a place: given as probabilities, or what sample's steps leave of its logits. q is what a
   draft was drawn from; without q a draft is certain, whatever proposed it. u < 1 are coins, one a place.

   noise: the target's own draw at every place, with sample's noise of seed, key and step + place; a draft stands while
     it is that draw. The text is that of plain decoding, token for token; at temperature 0 it is the greedy one.
   ratio: a draft x stands if u < p(x) / q(x) (Leviathan, Kalman & Matias 2023); else p becomes max(p - q, 0) and the
   next sibling in a tree is tried (Miao et al. 2024), and at last what is left of p is drawn from. Without q the
   siblings share the coin of their place: the first whose running sum of p exceeds it stands. block: all of the chain
   is weighed at once, which keeps more (Sun et al. 2024, arXiv 2403.10444). typical: a draft stands if p(x) >
   min(epsilon, alpha exp(-H(p))) (Cai et al. 2024); the output's law is not p.

   Only what decides is looked at: of probabilities the drafts' own, and whole rows where a token is drawn or p - q is
   needed. Each coin belongs to (seed, key, step, place), and what is left of p is drawn from with noise of a seed of
   its own, so a drafter may use the same seed. Where rounding leaves nothing of p - q, p itself is drawn from. A NaN,
   an infinity or a negative probability in what is looked at, or logits from which nothing can be chosen, make the
   sequence invalid: -1 throughout. */

enum { DOMAIN_COIN = 4, DOMAIN_SEED = 5 };

struct checking {
  const struct draft_args *a;
  int64_t first_target, count; /* of a sequence: its first row of the target, its drafts */
  const int64_t *draft, *parents;
  const float *q;
  struct sample_params params;
  const double *u;
  float *p, *left; /* room for a row each */
  char *scratch;
  int64_t *path; /* of the drafts that stand: their numbers */
  int64_t accepted;
};

INLINE int is_probability(float p) { return p >= 0.0f && p < INFINITY; }

INLINE const float *row_of_q(const struct checking *c, int64_t draft) {
  return c->q ? row_of(c->q, c->a->q_stride, draft) : NULL;
}

/* The first draft from `from` on that follows place `at`: 0 is before all drafts, i + 1 behind draft i; count if none.
 */
static int64_t child_of(const struct checking *c, int64_t at, int64_t from) {
  if (!c->parents) {
    return from <= at && at < c->count ? at : c->count;
  }
  while (from < c->count && c->parents[from] != at - 1) {
    from++;
  }
  return from;
}

static void stand(struct checking *c, int64_t draft) { c->path[c->accepted++] = draft; }

/* ---- noise ---- */

static uint64_t bits_of_draft(const struct checking *c, uint32_t domain, uint32_t item) {
  const struct philox_key key = {c->params.seed, c->params.key, (uint32_t)c->params.step};
  uint32_t items[LANES] = {item};
  uint64_t r[LANES];
  random_bits16(r, items, domain, &key);
  return r[0];
}

static double coin(const struct checking *c, int64_t place) {
  return c->u ? c->u[place] : small_to_double(bits_of_draft(c, DOMAIN_COIN, (uint32_t)place) >> 12) * 0x1p-52;
}

/* The numbers of the draw that follows `depth` drafts. */
static struct sample_params params_at(const struct checking *c, int64_t depth, int64_t place) {
  struct sample_params p = c->params;
  p.step = (uint32_t)(p.step + (uint64_t)depth);
  p.u = c->u ? c->u[place] : 0.0;
  return p;
}

/* ---- the target ---- */

static struct sample_args target_args(const struct checking *c, int64_t target, const struct sample_params *own) {
  const struct draft_args *a = c->a;
  struct sample_args args = {
      EDITS_OF(a),
      .has_u = c->u != NULL,
      .ties_all = a->ties_all,
      .force_exact = a->force_exact,
  };
  args.params.ptr = (void *)((uintptr_t)own - (uintptr_t)target * sizeof *own); /* row `target` has them */
  memcpy(args.steps, a->steps, sizeof args.steps);
  return args;
}

/* A token from probabilities; -1 if they are none. */
static int64_t draw_probs(const struct checking *c, const float *p, struct sample_params *own) {
  int64_t id;
  const struct probs_args args = {.x = {(void *)(uintptr_t)p, 0},
                                  .params = {own, 0},
                                  .ids = {&id, 0},
                                  .rows = 1,
                                  .cols = c->a->cols,
                                  .dtype = DTYPE_F32,
                                  .n = 1,
                                  .has_u = c->u != NULL};
  draw_from_probs(&id, &args, 0, c->scratch);
  return id;
}

/* The target's own draw behind place `at`, where a draft, if one follows, is likely. */
static int64_t draw_target(const struct checking *c, int64_t at, int64_t depth) {
  const int64_t target = c->first_target + at;
  struct sample_params own = params_at(c, depth, at);
  if (c->a->of_probs) {
    return draw_probs(c, row_of(c->a->x.ptr, c->a->x_stride, target), &own);
  }
  const struct sample_args args = target_args(c, target, &own);
  int64_t next = child_of(c, at, 0);
  int64_t token = sample_near(&args, target, next < c->count ? c->draft[next] : -1, c->scratch);
  return token < c->a->cols ? token : -1;
}

/* What sample's steps leave of the logits, as probabilities. */
static const float *probs_of_logits(const struct checking *c, int64_t target) {
  const struct sample_args args = target_args(c, target, &c->params);
  size_t n = (size_t)c->a->cols;
  struct row_state s;
  if (!write_whole(&s, &args, target, c->scratch)) {
    return NULL;
  }
  if (is_greedy(s.temperature)) {
    fill(c->p, n, 0.0f);
    c->p[first_equal(s.z, n, DTYPE_F32, s.max)] = 1.0f;
    return c->p;
  }
  const vf share = v_set1((float)(0x1p43 / (double)total_weight(&s)));
  for (size_t i = 0; i < n; i += LANES) {
    v_store(c->p + i, v_mul(term_of(v_load(s.z + i), (struct measure){s.max, s.inverse}, 1), share));
  }
  return c->p;
}

/* p behind place `at`; NULL if nothing can be chosen. */
static const float *probs_at(const struct checking *c, int64_t at) {
  int64_t target = c->first_target + at;
  return c->a->of_probs ? (const float *)row_of(c->a->x.ptr, c->a->x_stride, target) : probs_of_logits(c, target);
}

/* ---- what is left of p ---- */

/* What no probability is, among those seen. */
struct strange {
  vn nan;
  vf least, most;
};

/* 64 of left = max(scale p - q, 0), added to acc. An infinite p is seen in the sum. */
INLINE void leave64(vf acc[4], vf rest[4], const vf p[4], const vf q[4], vf scale, struct strange *seen) {
  const vf zero = v_set1(0.0f);
  vf differences[4];
  for (size_t j = 0; j < 4; j++) {
    differences[j] = v_fma(scale, p[j], v_sub(zero, q[j]));
    rest[j] = v_max(differences[j], zero);
    acc[j] = v_add(acc[j], rest[j]);
    seen->least = v_min(v_min(p[j], q[j]), seen->least);
    seen->most = v_max(q[j], seen->most);
  }
  seen->nan = see_four(seen->nan, differences);
}

/* left = max(scale p - q, 0), p may be left. Returns its sum, in blocks as softmax has it; NaN if p or q has what no
   probability is. */
static double leave(float *left, const float *p, double scale, const float *q, size_t n) {
  const vf times = v_set1((float)scale), zero = v_set1(0.0f);
  struct strange seen = {n_none(), zero, zero};
  double total = 0.0;
  for (size_t i = 0; i < n;) {
    vf acc[4] = {zero, zero, zero, zero}, a[4], b[4], rest[4];
    size_t end = min_size(i + SUM_BLOCK, n);
    for (; i + BLOCK <= end; i += BLOCK) {
      for (size_t j = 0; j < 4; j++) {
        a[j] = v_load(p + i + LANES * j);
        b[j] = v_load(q + i + LANES * j);
      }
      leave64(acc, rest, a, b, times, &seen);
      for (size_t j = 0; j < 4; j++) {
        v_store(left + i + LANES * j, rest[j]);
      }
    }
    if (i < end) {
      row_load64(a, p, i, n, DTYPE_F32, 0.0f);
      row_load64(b, q, i, n, DTYPE_F32, 0.0f);
      leave64(acc, rest, a, b, times, &seen);
      for (size_t j = 0; j < 4; j++) {
        store_upto(left, i + LANES * j, n, rest[j]);
      }
      i = end;
    }
    total += (double)sum_across64(acc);
  }
  int unfit = n_any(seen.nan) || m_bits(v_gt(zero, seen.least)) || !(v_max_across(seen.most) < INFINITY);
  return unfit || !(total < INFINITY) ? (double)NAN : total;
}

/* The token behind the drafts that stand: from what is left of p, or p where that is nothing. */
static int64_t draw_leftover(const struct checking *c, const float *left, const float *p) {
  struct sample_params own = params_at(c, 0, c->count);
  own.seed = bits_of_draft(c, DOMAIN_SEED, 0);
  int64_t id = left ? draw_probs(c, left, &own) : -1;
  return id < 0 ? draw_probs(c, p, &own) : id;
}

/* ---- the ways ---- */

static int64_t check_by_noise(struct checking *c) {
  int64_t at = 0;
  for (;;) {
    int64_t token = draw_target(c, at, c->accepted), next = child_of(c, at, 0);
    while (next < c->count && c->draft[next] != token) {
      next = child_of(c, at, next + 1);
    }
    if (token < 0 || next == c->count) {
      return token;
    }
    stand(c, next);
    at = next + 1;
  }
}

/* Goes on to the child of `at` that stands, if one does, else says what is left of p in *left. 0 if invalid. */
static int try_children(struct checking *c, const float *p, int64_t at, int64_t *next, const float **left) {
  size_t n = (size_t)c->a->cols;
  double scale = 1.0;
  for (*next = child_of(c, at, 0); *next < c->count; *next = child_of(c, at, *next + 1)) {
    const float *mine = *left ? *left : p, *q = row_of_q(c, *next);
    size_t x = (size_t)c->draft[*next];
    if (!is_probability(mine[x]) || !is_probability(q[x])) {
      return 0;
    }
    if (coin(c, *next) * (double)q[x] < scale * (double)mine[x]) {
      return 1;
    }
    double total = leave(c->left, mine, scale, q, n);
    *left = c->left;
    if (!(total > 0.0)) { /* nothing is left for the others */
      *next = c->count;
      return total == 0.0;
    }
    scale = 1.0 / total;
  }
  return 1;
}

/* The same without q. */
static int try_certain(struct checking *c, const float *p, int64_t at, int64_t *next, const float **left) {
  double sum = 0.0, u = coin(c, at);
  for (*next = child_of(c, at, 0); *next < c->count; *next = child_of(c, at, *next + 1)) {
    float own = p[c->draft[*next]];
    if (!is_probability(own)) {
      return 0;
    }
    sum += (double)own;
    if (own > 0.0f && (u * c->a->limits[1] < sum || (double)own >= c->a->limits[0])) {
      return 1;
    }
  }
  if (child_of(c, at, 0) < c->count) {
    memcpy(c->left, p, (size_t)c->a->cols * sizeof *p);
    for (int64_t i = child_of(c, at, 0); i < c->count; i = child_of(c, at, i + 1)) {
      c->left[c->draft[i]] = 0.0f;
    }
    *left = c->left;
  }
  return 1;
}

static int64_t check_by_ratio(struct checking *c) {
  int64_t at = 0;
  for (;;) {
    const float *p = probs_at(c, at), *left = NULL;
    int64_t next;
    if (!p || !(c->q ? try_children(c, p, at, &next, &left) : try_certain(c, p, at, &next, &left))) {
      return -1;
    }
    if (next == c->count) {
      return draw_leftover(c, left, p);
    }
    stand(c, next);
    at = next + 1;
  }
}

/* With what chance a block ends behind the i drafts whose joint ratio is `scale`, if no longer one does: in what is
   left of p behind them, and in p itself at the end. NaN if invalid. */
static double chance_of_end(struct checking *c, const float *p, int64_t i, double scale) {
  if (i == c->count) {
    return scale;
  }
  double rest = scale * (1.0 - (double)p[c->draft[i]]); /* of p - q where q is certain */
  if (c->q) {
    rest = leave(c->left, p, scale, row_of_q(c, i), (size_t)c->a->cols);
  }
  double whole = rest + (1.0 - scale);
  return whole > 0.0 ? rest / whole : rest == rest ? 1.0 : rest;
}

static int64_t check_by_block(struct checking *c) {
  const float *p = probs_at(c, 0);
  double scale = 1.0, scale_there = 1.0;
  int64_t there = 0;
  for (int64_t i = 0; p && i < c->count; i++) {
    size_t x = (size_t)c->draft[i];
    float own = p[x], q = c->q ? row_of_q(c, i)[x] : 1.0f;
    if (!is_probability(own) || !is_probability(q)) {
      return -1;
    }
    double ratio = q > 0.0f ? scale * ((double)own / (double)q) : own > 0.0f ? 1.0 : 0.0;
    scale = ratio < 1.0 ? ratio : 1.0;
    if (i + 1 < c->count) {
      p = probs_at(c, i + 1);
    }
    double chance = p ? chance_of_end(c, p, i + 1, scale) : (double)NAN;
    if (chance != chance) {
      return -1;
    }
    if (coin(c, i) < chance) {
      there = i + 1;
      scale_there = scale;
    }
  }
  for (int64_t i = 0; i < there; i++) {
    stand(c, i);
  }
  p = p ? probs_at(c, there) : NULL;
  if (!p || there == c->count) {
    return p ? draw_leftover(c, NULL, p) : -1;
  }
  if (c->q) {
    double total = leave(c->left, p, scale_there, row_of_q(c, there), (size_t)c->a->cols);
    return total == total ? draw_leftover(c, c->left, p) : -1;
  }
  memcpy(c->left, p, (size_t)c->a->cols * sizeof *p);
  c->left[c->draft[there]] = 0.0f;
  return draw_leftover(c, c->left, p);
}

static int is_typical(struct checking *c, int64_t at, int64_t token) {
  const int64_t target = c->first_target + at;
  const struct sample_args args = target_args(c, target, &c->params);
  size_t n = (size_t)c->a->cols;
  char *rest = c->scratch;
  float *z = (float *)take(&rest, (n + BLOCK) * sizeof *z);
  uint32_t *counts = (uint32_t *)take(&rest, n * sizeof *counts);
  float *maxima = (float *)take(&rest, (n / BLOCK + 2 * LANES) * sizeof *maxima);
  struct block_sums *sums = (struct block_sums *)take(&rest, (n / SUM_BLOCK + 1) * sizeof *sums);
  struct law law = {.inverse = (float)(1.0 / at_most_1e30(c->params.temperature)),
                    .greedy = is_greedy(c->params.temperature),
                    .with_entropy = 1,
                    .bound = INFINITY,
                    .certain = -1};
  write_edited(z, counts, &args, target);
  find_law(&law, z, n, DTYPE_F32, maxima, sums);
  double usual = c->a->limits[1] * exp64_1(-(double)law.entropy), p = exp64_1((double)logprob(&law, z[token], token));
  return law.valid && p > (usual < c->a->limits[0] ? usual : c->a->limits[0]);
}

static int64_t check_by_type(struct checking *c) {
  int64_t at = 0;
  for (; at < c->count && is_typical(c, at, c->draft[at]); at++) {
    stand(c, at);
  }
  return draw_target(c, at, at);
}

static int64_t check_draft(struct checking *c) {
  switch (c->a->method) {
  case DRAFT_NOISE:
    return check_by_noise(c);
  case DRAFT_RATIO:
    return check_by_ratio(c);
  case DRAFT_BLOCK:
    return check_by_block(c);
  default:
    return check_by_type(c);
  }
}

static void verify_draft(const struct draft_args *a, void *scratch) {
  size_t n = (size_t)a->cols, width = (size_t)a->width;
  FOR_ROWS (r, a) {
    const int64_t *starts = (const int64_t *)a->starts.ptr + 3 * r;
    int64_t *tokens = (int64_t *)a->tokens.ptr + width * (size_t)r;
    struct checking c = {
        .a = a,
        .first_target = starts[0],
        .count = starts[2],
        .draft = (const int64_t *)a->draft.ptr + starts[1],
        .parents = a->parents.ptr ? (const int64_t *)a->parents.ptr + starts[1] : NULL,
        .q = a->q.ptr ? row_of(a->q.ptr, a->q_stride, starts[1]) : NULL,
        .params = ((const struct sample_params *)a->params.ptr)[r],
        .u = a->u.ptr ? (const double *)a->u.ptr + starts[0] : NULL,
        .scratch = scratch,
        .path = (int64_t *)a->path.ptr + (width - 1) * (size_t)r,
    };
    c.p = (float *)take(&c.scratch, (n + BLOCK) * sizeof *c.p);
    c.left = (float *)take(&c.scratch, (n + BLOCK) * sizeof *c.left);
    memset(tokens, 0xff, width * sizeof *tokens); /* -1 */
    memset(c.path, 0xff, (width - 1) * sizeof *c.path);
    int64_t last = check_draft(&c);
    for (int64_t i = 0; last >= 0 && i < c.accepted; i++) {
      tokens[i] = c.draft[c.path[i]];
    }
    if (last >= 0) {
      tokens[c.accepted] = last;
    } else {
      memset(c.path, 0xff, (width - 1) * sizeof *c.path);
    }
    ((int64_t *)a->accepted.ptr)[r] = last < 0 ? 0 : c.accepted;
  }
}

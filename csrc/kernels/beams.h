/* beam_step: of each group of beams the n best continuations, best first.

   A continuation scores score + logprob in float64, logprob that of log_softmax, to the bit; ties go to the lowest
   beam, then id. One read of a row gives its sum and the maxima of its blocks of 64 (logprobs.h). A block is opened
   only if its maximum can beat the worst of the n best so far, and belongs to those that n logits of its own row reach.
   Nothing of the size beams x V is written.

   The groups of a search take turns, and each is told off for what the ones before it chose: a token that k beams of
   them go on with costs k times the penalty (Vijayakumar et al. 2016, Hamming diversity).

   Stochastic beams are n sequences drawn without replacement (Kool, van Hoof & Welling 2019): a continuation has the
   score plus Gumbel noise, on condition that the largest of a beam's is what the beam itself has.

   A beam of score -inf is not looked at. A NaN or +inf among the logits of one that is makes the search invalid: scores
   are NaN, tokens -1. A beam with nothing allowed has no continuation; -inf and -1 follow those there are. */

struct taken {
  uint32_t *token; /* one entry for each beam that goes on with it */
  size_t count;
};

struct group {
  const struct beam_args *a;
  size_t n, cols;
  struct winners best; /* ids are beam * cols + token */
  struct winner to_beat;
  struct law *laws; /* of each beam */
  const double *scores, *perturbed;
  struct taken taken;
};

INLINE double score_of(const struct law *law, double score, float z) { return score + (double)logprob(law, z, 0); }

static double penalty_of(const struct group *g, size_t token) {
  size_t times = 0;
  for (size_t i = 0; i < g->taken.count; i++) {
    times += g->taken.token[i] == token;
  }
  return (double)times * g->a->diversity_penalty;
}

INLINE double next_above(double x) {
  uint64_t u = double_bits(x + 0.0);
  return bits_double(u >> 63 ? u - 1 : u + 1);
}

/* The least logit with at least this score; +inf if there is none in the row. Neighbouring logits may have one score.
 */
static float least_reaching(const struct law *law, double score, double wanted) {
  uint32_t low = order_key(-FLT_MAX), high = order_key(law->max);
  if (!(score_of(law, score, law->max) >= wanted)) {
    return INFINITY;
  }
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (score_of(law, score, key_value(middle)) >= wanted) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return key_value(low);
}

/* Beams and ids come in ascending order, so what only equals the worst so far does not replace it. */
static float least_that_beats(const struct group *g, const struct law *law, double score, float least) {
  float beats = g->to_beat.hi == -INFINITY ? -FLT_MAX : least_reaching(law, score, next_above(g->to_beat.hi));
  return beats > least ? beats : least;
}

/* What logits of the row must reach to be among its own best that could count. */
static float least_of_row(const struct group *g, const struct law *law, const struct judged *row, double score) {
  size_t wanted = g->n + g->taken.count; /* those taken may fall back */
  if (g->a->force_exact || wanted > row->blocks) {
    return -FLT_MAX;
  }
  float reached = bound_reached(row->maxima, row->blocks, wanted, wanted + wanted / 4);
  return reached == -INFINITY ? -FLT_MAX : least_reaching(law, score, score_of(law, score, reached));
}

static void consider_block(struct group *g, const struct law *law, const struct judged *row, size_t beam, size_t block,
                           float least) {
  float room[BLOCK];
  const float *z = block_of(row, block, room);
  for (uint64_t hits = reaching64(z, least); hits; hits &= hits - 1) {
    size_t i = (size_t)__builtin_ctzll(hits), token = block * BLOCK + i;
    double score = score_of(law, g->scores[beam], z[i]) - penalty_of(g, token);
    struct winner w = {score, 0.0, beam * g->cols + token, z[i]};
    if (beats(w, g->to_beat)) {
      g->to_beat = enter(&g->best, w, g->to_beat);
    }
  }
}

static void consider_row(struct group *g, const struct law *law, const struct judged *row, size_t beam) {
  float own = least_of_row(g, law, row, g->scores[beam]);
  float least = g->a->force_exact ? own : least_that_beats(g, law, g->scores[beam], own);
  for (size_t b = 0; b < row->blocks; b += LANES) {
    for (unsigned hits = m_bits(v_ge(v_load(row->maxima + b), v_set1(least))); hits; hits &= hits - 1) {
      size_t block = b + (size_t)__builtin_ctz(hits);
      if (row->maxima[block] >= least) {
        consider_block(g, law, row, beam, block, least);
        least = g->a->force_exact ? own : least_that_beats(g, law, g->scores[beam], own);
      }
    }
  }
}

/* ---- stochastic beams ---- */

/* Noise of which the largest was `most`, on condition that it is `wanted`: -log(exp(-wanted) - exp(-most) +
   exp(-noise)), as the paper's appendix has it. */
static double conditioned(double noise, double most, double wanted) {
  double below = 1.0 - exp64_1(noise - most);
  if (!(below > 0.0)) {
    return wanted;
  }
  double v = wanted - noise + log64_1(below);
  return wanted - (v > 0.0 ? v : 0.0) - log64_1(1.0 + exp64_1(v > 0.0 ? -v : v));
}

static void draw_row(struct group *g, const struct law *law, const struct judged *row, size_t beam, int64_t at,
                     char *scratch) {
  const struct philox_key key = key_of(&g->a->params, at);
  struct winners drawn = {(struct winner *)take(&scratch, g->n * sizeof *drawn.heap), 0, min_size(g->n, g->cols)};
  double shift = g->scores[beam] - (double)law->max - (double)law->log_total;
  gumbel_best(row, everything, 1.0, &key, &drawn);
  put_in_order(&drawn);
  for (size_t i = 0; i < drawn.count; i++) {
    double noise = conditioned(drawn.heap[i].hi + shift, drawn.heap[0].hi + shift, g->perturbed[beam]);
    size_t token = drawn.heap[i].id;
    struct winner w = {noise - penalty_of(g, token), 0.0, beam * g->cols + token, drawn.heap[i].z};
    if (beats(w, g->to_beat)) {
      g->to_beat = enter(&g->best, w, g->to_beat);
    }
  }
}

/* ---- groups ---- */

/* The logits of beam `at` of all, where they lie or, if they are edited, written out. */
static struct judged beam_row(const struct beam_args *a, int64_t at, char **scratch) {
  size_t n = (size_t)a->cols;
  const void *x = row_of(a->x.ptr, a->x_stride, at);
  int64_t dtype = a->dtype;
  if (a->bias_values.ptr || a->prompt_ids.ptr || a->output_ids.ptr || a->mask_kind != MASK_NONE) {
    const struct sample_args edits = {EDITS_OF(a), .params = a->params};
    float *z = (float *)take(scratch, (n + BLOCK) * sizeof *z);
    uint32_t *counts = (uint32_t *)take(scratch, n * sizeof *counts);
    write_edited(z, counts, &edits, at);
    x = z;
    dtype = DTYPE_F32;
  }
  return plain_row(x, n, dtype, (float *)take(scratch, (n / BLOCK + 2 * LANES) * sizeof(float)));
}

/* 0 if it makes the search invalid. */
static int consider_beam(struct group *g, size_t beam, int64_t at, char *scratch) {
  struct judged row = beam_row(g->a, at, &scratch);
  struct block_sums *sums = (struct block_sums *)take(&scratch, (g->cols / SUM_BLOCK + 1) * sizeof *sums);
  struct law *law = &g->laws[beam];
  *law = (struct law){.inverse = 1.0f, .bound = INFINITY, .certain = -1};
  find_law(law, row.x, row.n, row.dtype, row.maxima, sums);
  if (!law->valid) {
    return law->nothing;
  }
  row.max = law->max;
  if (g->perturbed) {
    draw_row(g, law, &row, beam, at, scratch);
  } else {
    consider_row(g, law, &row, beam);
  }
  return 1;
}

static int is_eos(const struct beam_args *a, int64_t token) {
  for (int64_t i = 0; i < a->eos_count; i++) {
    if (((const int64_t *)a->eos_ids.ptr)[i] == token) {
      return 1;
    }
  }
  return 0;
}

static void put_group(struct group *g, int64_t group, int valid) {
  const struct beam_args *a = g->a;
  double *scores = (double *)a->to_scores.ptr + group * a->n, *perturbed = (double *)a->to_perturbed.ptr;
  int64_t *beams = (int64_t *)a->to_beams.ptr + group * a->n, *tokens = (int64_t *)a->to_tokens.ptr + group * a->n;
  size_t going_on = 0;
  for (size_t i = 0; i < g->n; i++) {
    int there = valid && i < g->best.count;
    struct winner w = there ? g->best.heap[i] : (struct winner){valid ? -INFINITY : (double)NAN, 0.0, 0, 0.0f};
    size_t beam = w.id / g->cols, token = w.id % g->cols;
    scores[i] = there && perturbed ? score_of(&g->laws[beam], g->scores[beam], w.z) : w.hi;
    beams[i] = there ? (int64_t)beam : -1;
    tokens[i] = there ? (int64_t)token : -1;
    if (perturbed) {
      perturbed[group * a->n + (int64_t)i] = w.hi;
    }
    if (there && going_on < (size_t)a->beams && !is_eos(a, (int64_t)token)) {
      g->taken.token[g->taken.count++] = (uint32_t)token;
      going_on++;
    }
  }
}

static void beam_step(const struct beam_args *a, void *scratch) {
  FOR_ROWS (r, a) {
    char *rest = scratch;
    struct group g = {.a = a, .n = (size_t)a->n, .cols = (size_t)a->cols};
    g.best.heap = (struct winner *)take(&rest, g.n * sizeof *g.best.heap);
    g.laws = (struct law *)take(&rest, (size_t)a->beams * sizeof *g.laws);
    g.taken.token = (uint32_t *)take(&rest, (size_t)(a->groups * a->beams) * sizeof *g.taken.token);
    int valid = 1;
    for (int64_t group = r * a->groups; group < (r + 1) * a->groups; group++) {
      int64_t first = group * a->beams;
      g.best = (struct winners){g.best.heap, 0, g.n};
      g.to_beat = (struct winner){-INFINITY, 0.0, g.cols * (size_t)a->beams, -INFINITY};
      g.scores = (const double *)a->scores.ptr + first;
      g.perturbed = a->perturbed.ptr ? (const double *)a->perturbed.ptr + first : NULL;
      for (size_t b = 0; valid && b < (size_t)a->beams; b++) {
        valid = g.scores[b] == -INFINITY || consider_beam(&g, b, first + (int64_t)b, rest);
      }
      put_in_order(&g.best);
      put_group(&g, group, valid);
    }
    for (int64_t i = r * a->groups * a->n; !valid && i < (r + 1) * a->groups * a->n; i++) {
      ((double *)a->to_scores.ptr)[i] = (double)NAN;
      ((int64_t *)a->to_beams.ptr)[i] = ((int64_t *)a->to_tokens.ptr)[i] = -1;
    }
  }
}

/* The nucleus itself, for those who want all of it: the prefix at which the mass reaches top_p of the total.

   A few entries give a guess of bounds around its end; one read weighs both sides of them exactly; what lies between is
   bisected by exact masses. The guess decides nothing: a bad one leaves more to bisect, at worst all of the row, and
   something goes in every round. */

/* What an entry weighs: round(2^43 * term), the term exp((z - max) * inverse) of a logit, p / max of a probability. */
struct measure {
  float max, inverse; /* inverse 0: of probabilities */
};

/* 0 of -inf, which is what lies beyond a row. */
INLINE vf term_of(vf v, struct measure m, int of_logits) {
  const vf max = v_set1(m.max);
  return of_logits ? v_exp(v_mul(v_sub(v, max), v_set1(m.inverse))) : v_div(v_max(v, v_set1(0.0f)), max);
}

INLINE uint64_t mass_as(const float *x, size_t n, struct measure m, struct prefix kept, int of_logits) {
  const struct cut cut = cut_of(kept);
  struct tally mass = no_tally();
  for (size_t i = 0; i < n;) {
    uint32_t adds = 0;
    for (size_t end = min_size(i + TALLY * LANES, n); i < end; i += LANES) {
      vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, -INFINITY);
      vm which = is_kept(&cut, i, v);
      if (m_bits(which)) {
        tally(&mass, v_keep(which, term_of(v, m, of_logits)));
        adds++;
      }
    }
    settle_tally(&mass, adds);
  }
  return tally_total(&mass);
}
static uint64_t mass_of(const float *x, size_t n, struct measure m, struct prefix kept) {
  return m.inverse > 0.0f ? mass_as(x, n, m, kept, 1) : mass_as(x, n, m, kept, 0);
}

/* What reaches the bound, or what does not, into `to`, which may be x: stores never pass what has been read. */
static size_t pick_side(float *to, const float *x, size_t n, float bound, int reaching) {
  const vf t = v_set1(bound);
  size_t count = 0;
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, NAN);
    count += v_compress(to + count, v, reaching ? v_ge(v, t) : v_gt(t, v));
  }
  return count;
}

/* The last of all if there are fewer, which only a row that changes meanwhile can have. */
static size_t nth_equal(const float *x, size_t n, float value, uint64_t nth) {
  float equals[LANES];
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, NAN);
    vm equal = v_eq(v, v_set1(value));
    size_t count = v_compress(equals, v, equal);
    if (nth <= count) {
      unsigned hits = m_bits(equal);
      while (--nth) {
        hits &= hits - 1;
      }
      return i + (size_t)__builtin_ctz(hits);
    }
    nth -= count;
  }
  return n - 1;
}

/* The entry with which the running weight reaches limit, sought in what is left of a row. */
struct search {
  float *left; /* count entries */
  size_t count;
  uint64_t above; /* the weight of what is before all of them */
  uint64_t total; /* of the row */
};

enum { SAMPLES = 256, SLACK = 16 }; /* ranks: a quantile of so many is seldom two deviations, 2 * 8, off */

/* Bounds between which, by the look of a few entries, the share top_p is reached. */
static void guess_bounds(const float *x, size_t n, struct measure m, double top_p, char *scratch, float *low,
                         float *high) {
  struct list some = list_in(&scratch, SAMPLES), spare = list_in(&scratch, SAMPLES);
  uint64_t w[SAMPLES], total = 0, running = 0;
  size_t rank = 0;
  *low = -FLT_MAX;
  *high = INFINITY;
  if (n < 8 * SAMPLES) {
    return;
  }
  for (; some.count < SAMPLES; some.count++) {
    some.value[some.count] = x[n / SAMPLES * some.count];
  }
  sort_list(&some, &spare);
  for (size_t i = 0; i < SAMPLES; i += LANES) {
    w_store(w + i, term_of(v_load(some.value + i), m, m.inverse > 0.0f));
  }
  for (size_t i = 0; i < SAMPLES; i++) {
    total += w[i];
  }
  for (uint64_t limit = top_p_limit(top_p, total); rank < SAMPLES - 1 && running + w[rank] < limit; rank++) {
    running += w[rank];
  }
  if (rank >= SLACK) {
    *high = some.value[rank - SLACK];
  }
  if (rank + SLACK < SAMPLES && some.value[rank + SLACK] > -FLT_MAX) {
    *low = some.value[rank + SLACK];
  }
}

/* One read of the row: what it weighs, what reaches high weighs, and what is between the bounds. */
INLINE void split_mass_as(struct search *s, const float *x, size_t n, struct measure m, float low, float high,
                          int of_logits) {
  const vf bottom = v_set1(low), top = v_set1(high);
  struct tally total = no_tally(), above = no_tally();
  float *left = s->left; /* not through s, which stores of vectors might change for all the compiler knows */
  size_t count = 0;
  for (size_t i = 0; i < n;) {
    uint32_t adds = 0;
    for (size_t end = min_size(i + TALLY * LANES, n); i < end; i += LANES, adds++) {
      vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, -INFINITY), term = term_of(v, m, of_logits);
      tally_both(&total, &above, term, v_ge(v, top));
      count += v_compress(left + count, v, m_and(v_ge(v, bottom), v_gt(top, v)));
    }
    settle_tally(&total, adds);
    settle_tally(&above, adds);
  }
  s->count = count;
  s->total = tally_total(&total);
  s->above = tally_total(&above);
}
static void split_mass(struct search *s, const float *x, size_t n, struct measure m, float low, float high) {
  if (m.inverse > 0.0f) {
    split_mass_as(s, x, n, m, low, high, 1);
  } else {
    split_mass_as(s, x, n, m, low, high, 0);
  }
}

/* Bisects between the extremes of what is left, so that something goes in every round, and HALVINGS + 32 rounds are the
   most, whatever the values. */
static float bisect(struct search *s, struct measure m, uint64_t limit) {
  float least, most;
  int round = m.inverse > 0.0f ? 0 : HALVINGS;
  for (extremes(s->left, s->count, -INFINITY, &least, &most); least < most;
       extremes(s->left, s->count, -INFINITY, &least, &most)) {
    float middle = between(least, most, round++);
    uint64_t mass = s->above + mass_of(s->left, s->count, m, (struct prefix){middle, s->count});
    int reached = mass >= limit;
    s->count = pick_side(s->left, s->left, s->count, middle, reached);
    s->above = reached ? s->above : mass;
  }
  return least;
}

/* A prefix and what it weighs. */
struct weighed {
  struct prefix prefix;
  uint64_t weight;
};

/* The prefix with whose last entry the running weight reaches top_p of the row's; x has a NaN nowhere, and -inf where
   nothing weighs. */
static struct weighed kept_by_mass(const float *x, size_t n, struct measure m, double top_p, char *scratch) {
  struct search s = {.left = list_in(&scratch, n).value};
  float low, high;
  guess_bounds(x, n, m, top_p, scratch, &low, &high);
  split_mass(&s, x, n, m, low, high);
  uint64_t limit = top_p_limit(top_p, s.total);
  const int at_top = s.above >= limit && high >= m.max; /* what reaches it is equal to it */
  if (s.above >= limit) {
    s.above = 0;
    s.count = at_top ? n : pick_side(s.left, x, n, high, 1);
  }
  float value = at_top ? high : bisect(&s, m, limit);
  uint64_t w = s.count ? mass_of(&value, 1, m, everything) : 0;
  if (s.above + s.count * w < limit) { /* it is below them all */
    s.above += s.count * w;
    s.count = pick_side(s.left, x, n, low, 0);
    value = bisect(&s, m, limit);
    w = mass_of(&value, 1, m, everything);
  }
  uint64_t ties = w ? (limit - s.above - 1) / w + 1 : 1; /* s.above < limit; never 0, whatever w of a changing row is */
  return (struct weighed){{value, nth_equal(x, n, value, ties) + 1}, s.above + ties * w};
}

/* Whether the nucleus is surely among the first few, by their exact weights and a rough total. */
static int ends_early(struct nucleus *n, struct weighed *kept, char *scratch) {
  const double most_off = ROUGH_SHARE + SUM_SHARE;
  if (n->top_p * least_mass(n->row, n->of, n->inverse) * (1.0 - most_off) > FEW) { /* none weighs more than 1 */
    return 0;
  }
  const struct list first = first_of(n->row, min_size(FEW, n->row->blocks), &scratch);
  const struct weighing how = {1, n->row->max, n->inverse, 0.0};
  uint64_t w[FEW + LANES], weight = 0;
  for (size_t i = 0; i < first.count; i += LANES) {
    weigh16(w + i, v_load(first.value + i), &how);
  }
  n->rough = rough_mass(n->row, n->of, n->inverse);
  double total = n->rough * 0x1p43;
  uint64_t least = top_p_limit(n->top_p, (uint64_t)(total * (1.0 - most_off)));
  uint64_t most = top_p_limit(n->top_p, (uint64_t)(total / (1.0 - most_off)));
  for (size_t i = 0; i < first.count && is_in(n->of, first.value[i], first.id[i]) && weight < least; i++) {
    weight += w[i];
    *kept = (struct weighed){{first.value[i], first.id[i] + 1}, weight};
  }
  return weight >= most;
}

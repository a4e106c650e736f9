/* The mass of a part of a row: rough, within a known share of the truth, or exact, as a sum of integer weights. Blocks
   that cannot have a part in it are not read. */

#define ROUGH_SHARE 0.031 /* v_exp_rough beside v_exp (tested over every float of its range) */
#define SUM_SHARE 2e-5    /* what float32 sums of 70 terms, float64 sums of those, and rounding to weights add */

/* Which of the 16 logits from id `first` on are in p. */
INLINE vm lanes_in(vf z, size_t first, struct prefix p) {
  size_t ties = p.end <= first ? 0 : min_size(LANES, p.end - first);
  return m_or(v_gt(z, v_set1(p.value)), m_and(v_eq(z, v_set1(p.value)), m_of_bits((1u << ties) - 1u)));
}

/* The exponentials of a block's part in p, 0 for the rest. A whole block is before p.end or behind it, but for one. */
INLINE void terms_in(vf e[4], const float *z, size_t first, struct prefix p, float max, float inverse, int rough) {
  const vf top = v_set1(max), inv = v_set1(inverse), value = v_set1(p.value);
  for (size_t i = 0; i < 4; i++) {
    vf v = v_load(z + LANES * i), y = v_mul(v_sub(v, top), inv), term = rough ? v_exp_rough(y) : v_exp(y);
    vm in = p.end <= first           ? v_gt(v, value)
            : p.end >= first + BLOCK ? v_ge(v, value)
                                     : lanes_in(v, first + LANES * i, p);
    e[i] = v_keep(in, term);
  }
}

/* Whether a block's maximum lets it have a part in p. */
INLINE int has_part(const struct judged *j, size_t block, struct prefix p) {
  return p.end <= block * BLOCK ? j->maxima[block] > p.value
                                : j->maxima[block] >= p.value && j->maxima[block] > -INFINITY;
}

static double rough_mass(const struct judged *j, struct prefix p, float inverse) {
  double total = 0.0;
  for (size_t b = 0; b < j->blocks;) {
    vf acc[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)}, e[4];
    for (size_t end = min_size(b + BLOCK, j->blocks); b < end; b++) {
      if (has_part(j, b, p)) {
        float room[BLOCK];
        terms_in(e, block_of(j, b, room), b * BLOCK, p, j->max, inverse, 1);
        for (size_t i = 0; i < 4; i++) {
          acc[i] = v_add(acc[i], e[i]);
        }
      }
    }
    total += (double)sum_across64(acc);
  }
  return total;
}

/* At least this much is in p, at a glance: the blocks' maxima, which are in it or have no part in it. */
static double least_mass(const struct judged *j, struct prefix p, float inverse) {
  double total = 0.0;
  for (size_t b = 0; b < j->blocks; b += LANES) {
    vf z = v_load(j->maxima + b), y = v_mul(v_sub(z, v_set1(j->max)), v_set1(inverse));
    total += (double)v_sum_across(v_keep(v_gt(z, v_set1(p.value)), v_exp_rough(y)));
  }
  return total;
}

/* A sum of weights, to the bit what w_add makes, in fewer instructions where floats come in vectors: a weight is 2^23
   times a whole number and a rest, both small enough to add up many in 32 bits. Between settlings no more than TALLY
   adds. */
enum { TALLY = 256 };
#ifdef LANEWISE_SCALAR
struct tally {
  vw sum;
};

INLINE struct tally no_tally(void) { return (struct tally){w_zero()}; }
INLINE void tally(struct tally *t, vf e) { t->sum = w_add(t->sum, e); }
INLINE void tally_both(struct tally *all, struct tally *some, vf e, vm which) {
  tally(all, e);
  tally(some, v_keep(which, e));
}
INLINE void settle_tally(struct tally *t, uint32_t adds) { (void)t, (void)adds; }
INLINE uint64_t tally_total(const struct tally *t) { return w_total(t->sum); }
#else
struct tally {
  vu high, low;
  uint64_t total;
};

INLINE struct tally no_tally(void) { return (struct tally){u_set1(0), u_set1(0), 0}; }
/* 12, whose last bit is worth 2^-20, and 1.5 * 2^23, whose last bit is worth 1: what nothing adds */
#define HIGH_NONE v_set1(12.0f)
#define LOW_NONE v_set1(0x1.8p23f)
INLINE void split_weight(vf *high, vf *low, vf e) {
  *high = v_add(e, HIGH_NONE);
  *low = v_fma(v_sub(e, v_sub(*high, HIGH_NONE)), v_set1(0x1p43f), LOW_NONE);
}
INLINE void add_split(struct tally *t, vf high, vf low) {
  t->high = u_add(t->high, v_bits(high));
  t->low = u_add(t->low, v_bits(low));
}
INLINE void tally(struct tally *t, vf e) {
  vf high, low;
  split_weight(&high, &low, e);
  add_split(t, high, low);
}
/* All of e to one sum, what is in `which` to another. */
INLINE void tally_both(struct tally *all, struct tally *some, vf e, vm which) {
  vf high, low;
  split_weight(&high, &low, e);
  add_split(all, high, low);
  add_split(some, v_select(which, high, HIGH_NONE), v_select(which, low, LOW_NONE));
}
static void settle_lanes(uint64_t *total, const uint32_t high[LANES], const uint32_t low[LANES], uint32_t adds) {
  for (size_t i = 0; i < LANES; i++) {
    uint32_t whole = high[i] - adds * 0x41400000u, rest = low[i] - adds * 0x4b400000u; /* bits of 12 and of 1.5 2^23 */
    *total += ((uint64_t)whole << 23) + (uint64_t)(int64_t)(int32_t)rest;
  }
}
INLINE void settle_tally(struct tally *t, uint32_t adds) {
  uint32_t high[LANES], low[LANES];
  u_store(high, t->high);
  u_store(low, t->low);
  settle_lanes(&t->total, high, low, adds);
  t->high = t->low = u_set1(0);
}
INLINE uint64_t tally_total(const struct tally *t) { return t->total; }
#endif

static uint64_t exact_mass(const struct judged *j, struct prefix p, float inverse) {
  struct tally mass = no_tally();
  for (size_t b = 0; b < j->blocks;) {
    uint32_t adds = 0;
    for (size_t end = min_size(b + TALLY / 4, j->blocks); b < end; b++) {
      if (has_part(j, b, p)) {
        float room[BLOCK];
        vf e[4];
        terms_in(e, block_of(j, b, room), b * BLOCK, p, j->max, inverse, 0);
        for (size_t i = 0; i < 4; i++) {
          tally(&mass, e[i]);
        }
        adds += 4;
      }
    }
    settle_tally(&mass, adds);
  }
  return tally_total(&mass);
}

static size_t count_in(const struct judged *j, struct prefix p) {
  const vf one = v_set1(1.0f);
  vf count = v_set1(0);
  for (size_t b = 0; b < j->blocks; b++) {
    if (has_part(j, b, p)) {
      float room[BLOCK];
      const float *z = block_of(j, b, room);
      for (size_t i = 0; i < BLOCK; i += LANES) {
        count = v_add(count, v_keep(lanes_in(v_load(z + i), b * BLOCK + i, p), one));
      }
    }
  }
  return (size_t)v_sum_across(count); /* exact up to 2^24 */
}

/* ---- top-p without its nucleus ---- */

/* What it takes to say whether an id is in the nucleus: whether the mass before it is less than top_p of the total. */
struct nucleus {
  const struct judged *row;
  struct prefix of; /* the total is of this */
  float inverse;
  double top_p;
  size_t min_keep;
  int ties_all;
  double least, rough; /* of the total; negative: not known yet */
  uint64_t exact;      /* 0: not known yet */
};

INLINE struct nucleus whole_nucleus(const struct judged *row, float inverse, double top_p) {
  return (struct nucleus){row, everything, inverse, top_p, 1, 0, -1.0, -1.0, 0};
}

/* The three answers below agree wherever two of them dare to answer. */
enum verdict { OUTSIDE, INSIDE, UNDECIDED };

static enum verdict by_rough_mass(struct nucleus *n, double before) {
  const double more = 1.0 + ROUGH_SHARE, less = 1.0 - ROUGH_SHARE;
  if (n->least < 0.0) {
    n->least = least_mass(n->row, n->of, n->inverse);
  }
  if (before * more + n->least * SUM_SHARE < n->top_p * n->least * less) {
    return INSIDE;
  }
  if (n->rough < 0.0) {
    n->rough = rough_mass(n->row, n->of, n->inverse);
  }
  /* before < p (before + rest), with the two sums' errors apart */
  double rest = n->rough - before, slack = n->rough * SUM_SHARE;
  double mine = (1.0 - n->top_p) * before, theirs = n->top_p * rest;
  return mine * more + slack < theirs * less ? INSIDE : mine * less - slack > theirs * more ? OUTSIDE : UNDECIDED;
}

static int is_in_nucleus(struct nucleus *n, struct winner w) {
  const struct prefix before = {w.z, n->ties_all ? 0 : w.id};
  double rough = rough_mass(n->row, before, n->inverse);
  if (rough == 0.0) { /* it is the first: no sum of anything is 0 */
    return 1;
  }
  if (n->min_keep > 1 && count_in(n->row, (struct prefix){w.z, w.id}) < n->min_keep) {
    return 1;
  }
  enum verdict verdict = n->top_p > 0.0 ? by_rough_mass(n, rough) : OUTSIDE;
  if (verdict != UNDECIDED) {
    return verdict == INSIDE;
  }
  if (!n->exact) {
    n->exact = exact_mass(n->row, n->of, n->inverse);
  }
  return exact_mass(n->row, before, n->inverse) < top_p_limit(n->top_p, n->exact);
}

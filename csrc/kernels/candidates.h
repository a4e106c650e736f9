/* What the steps of a chain do to a list of candidates: ids in descending order of their values, ties ascending. Each
   step keeps a part of it, or gives it other values. (Formulas: docs/samplers.md, and reference.py to the bit.) */

#define LN2 6.93147180559945286227e-01

/* Most steps are short lists' work and most programs have few of them: their code is to be small. */
#define SELDOM static __attribute__((noinline, cold))
#define WHOLE_ROW static __attribute__((noinline, hot)) /* whoever calls it */

SELDOM double log_1(double x) { return log64_1(x); }
SELDOM double exp_1(double x) { return exp64_1(x < 700.0 ? x : 700.0); }

struct candidates {
  struct list list;
  uint64_t *weight; /* of each, and of all: known while `total` is not 0 */
  uint64_t total;
  double temperature;
  float max;     /* what y is measured from: the first value, if it is a list of its own */
  int is_prefix; /* of the row as it is judged, with its values */
};

INLINE float inverse_of(const struct candidates *c) { return (float)(1.0 / c->temperature); }
INLINE double log_weight(uint64_t w) { return log_1((double)w) - WEIGHT_BITS * LN2; }

/* What a weight must reach to be a share of the total. */
static uint64_t share_limit(double share, uint64_t total) {
  uint64_t limit = share < 1.0 ? times_weight(share, total, 1) : total;
  return limit ? limit : 1;
}

static void weigh(struct candidates *c) {
  if (c->total) {
    return;
  }
  const struct weighing how = {1, c->max, inverse_of(c), 0.0};
  for (size_t i = 0; i < c->list.count; i += LANES) {
    weigh16(c->weight + i, v_load(c->list.value + i), &how);
  }
  for (size_t i = 0; i < c->list.count; i++) {
    c->total += c->weight[i];
  }
}

INLINE float y_of(const struct candidates *c, size_t i) { return (c->list.value[i] - c->max) * inverse_of(c); }

/* e and -y e, y = (z - max) * inverse: what a total and a mean are made of. */
INLINE vf terms_of_mean(vf *e, vf z, vf max, vf inverse) {
  vf y = v_mul(v_sub(z, max), inverse);
  *e = v_exp(y);
  return v_mul(*e, v_min(v_sub(v_set1(0.0f), y), v_set1(88.0f)));
}

/* The mean of -y by weight, a quotient of exact sums. */
SELDOM double mean_of(struct candidates *c) {
  const vf max = v_set1(c->max), inverse = v_set1(inverse_of(c));
  vw sum = w_zero();
  weigh(c);
  for (size_t i = 0; i < c->list.count; i += LANES) {
    vf e, v = v_load_n(c->list.value + i, min_size(LANES, c->list.count - i), -INFINITY);
    sum = w_add(sum, terms_of_mean(&e, v, max, inverse));
  }
  return (double)w_total(sum) / (double)c->total;
}

static void keep_first(struct candidates *c, size_t count, double min_keep) {
  size_t least = min_keep > 1.0 ? (size_t)min_keep : 1;
  count = min_size(count > least ? count : least, c->list.count);
  c->total = count < c->list.count ? 0 : c->total;
  c->list.count = count;
}

/* first .. end - 1 */
static void keep_part(struct candidates *c, size_t first, size_t end) {
  c->list.value += first;
  c->list.id += first;
  c->list.count = end - first;
  c->max = c->list.value[0];
  c->total = 0;
  c->is_prefix &= !first;
}

/* 0 if it is as good as none. */
static int multiply_temperature(double *temperature, double by) {
  *temperature = at_most_1e30(*temperature * at_most_1e30(by));
  return !is_greedy(by) && !is_greedy(*temperature);
}

static void cool(struct candidates *c, double by) {
  c->total = 0;
  if (!multiply_temperature(&c->temperature, by)) {
    keep_first(c, 1, 0.0);
    c->temperature = 1.0;
  }
}

/* T between low and high, as the entropy is between none and that of `count` equals. */
SELDOM double dynamic_temperature(const double number[3], double entropy, size_t count) {
  double temperature = number[0], delta = number[1], exponent = number[2];
  double low = temperature - delta > 0.0 ? temperature - delta : 0.0, high = temperature + delta;
  double share = entropy / log_1((double)count);
  share = share > 0.0 ? share : 0.0;
  share = share < 1.0 ? share : 1.0;
  double power = exponent == 0.0 ? 1.0 : share < DBL_MIN ? 0.0 : exp_1(exponent * log_1(share));
  return low + (high - low) * power;
}

SELDOM void cool_by_entropy(struct candidates *c, const double number[3]) {
  if (number[1] > 0.0 && c->list.count > 1) {
    double mean = mean_of(c);
    cool(c, dynamic_temperature(number, log_weight(c->total) + mean, c->list.count));
  } else if (!(number[1] > 0.0)) {
    cool(c, number[0]);
  }
}

static void first_of_candidates(struct candidates *c, double k, int ties_all) {
  if (k > 0.0) {
    size_t count = k < (double)c->list.count ? (size_t)k : c->list.count;
    while (ties_all && count < c->list.count && c->list.value[count] == c->list.value[count - 1]) {
      count++;
    }
    keep_first(c, count, 0.0);
  }
}

static void top_p_of_candidates(struct candidates *c, const double number[3]) {
  if (number[0] < 1.0) {
    weigh(c);
    uint64_t limit = top_p_limit(number[0], c->total), before = 0;
    size_t count = 0;
    while (count < c->list.count && before < limit) {
      before += c->weight[count++];
    }
    while (number[2] != 0.0 && count < c->list.count && c->list.value[count] == c->list.value[count - 1]) {
      count++;
    }
    keep_first(c, count, number[1]);
  }
}

static void keep_reaching(struct candidates *c, float bound, double min_keep) {
  size_t count = 0;
  while (count < c->list.count && c->list.value[count] >= bound) {
    count++;
  }
  keep_first(c, count, min_keep);
}

static size_t count_weighing(struct candidates *c, uint64_t limit) {
  size_t count = 0;
  while (count < c->list.count && c->weight[count] >= limit) {
    count++;
  }
  return count;
}

static void keep_share(struct candidates *c, double share, double min_keep) {
  weigh(c);
  keep_first(c, count_weighing(c, share_limit(share, c->total)), min_keep);
}

SELDOM double eta_share(double epsilon, double entropy) {
  double share = __builtin_sqrt(epsilon) * exp_1(-entropy);
  return share < epsilon ? share : epsilon;
}

/* a * (largest p)^2 as a share of what the largest weighs */
static uint64_t top_a_limit(double a, uint64_t total) {
  return share_limit(a * (0x1p43 / (double)total), (uint64_t)1 << WEIGHT_BITS);
}

SELDOM void keep_top_a(struct candidates *c, double a) {
  weigh(c);
  keep_first(c, count_weighing(c, top_a_limit(a, c->total)), 0.0);
}

/* Typical: the nearest to the mean first, until they weigh `limit`; those as near above it in their order. first ..
   part - 1 and high .. end - 1 are, and which of them was the last. */
struct nearest {
  size_t first, part, high, end, last;
};

SELDOM struct nearest nearest_of(const struct candidates *c, double mean, uint64_t limit, double min_keep) {
  size_t n = c->list.count, taken = 0, low = 0;
  uint64_t before = 0;
  while (low < n && (double)y_of(c, low) + mean > 0.0) {
    low++;
  }
  struct nearest t = {0, 0, low, low, low};
  while ((t.high > 0 || t.end < n) && (before < limit || (double)taken < min_keep)) {
    double over = t.high > 0 ? (double)y_of(c, t.high - 1) + mean : INFINITY;
    double under = t.end < n ? -((double)y_of(c, t.end) + mean) : INFINITY;
    if (t.high == 0 || under < over) {
      before += c->weight[t.end];
      t.last = t.end++;
      taken++;
      continue;
    }
    t.first = t.high - 1;
    while (t.first > 0 && (double)y_of(c, t.first - 1) + mean == over) {
      t.first--;
    }
    for (t.part = t.first; t.part < t.high && (before < limit || (double)taken < min_keep); taken++) {
      before += c->weight[t.part];
      t.last = t.part++;
    }
    if (t.part < t.high) {
      return t;
    }
    t.high = t.first;
  }
  t.first = t.part = t.high;
  return t;
}

SELDOM void typical_candidates(struct candidates *c, double p, double min_keep) {
  if (p < 1.0) {
    double mean = mean_of(c);
    const struct nearest t = nearest_of(c, mean, top_p_limit(p, c->total), min_keep);
    size_t part = t.part - t.first;
    memmove(c->list.value + t.high - part, c->list.value + t.first, part * sizeof *c->list.value);
    memmove(c->list.id + t.high - part, c->list.id + t.first, part * sizeof *c->list.id);
    c->is_prefix &= !part;
    keep_part(c, t.high - part, t.end);
  }
}

enum { TOP_H = 100 };

/* Their entropy, summed in order, up to its share h. */
SELDOM void top_h_of_candidates(struct candidates *c, double h) {
  double sum[TOP_H], total;
  size_t n = min_size(c->list.count, TOP_H), kept = 0;
  keep_first(c, n, 0.0);
  weigh(c);
  total = (double)c->total;
  double log_total = log_weight(c->total), running = 0.0;
  for (size_t i = 0; i < n; i++) {
    running += c->weight[i] ? (double)c->weight[i] / total * (log_total - (double)y_of(c, i)) : 0.0;
    sum[i] = running;
  }
  while (kept < n && sum[kept] <= running * h) {
    kept++;
  }
  keep_first(c, kept, 0.0);
}

/* By the absolute second differences of the weights. */
SELDOM void tail_free_candidates(struct candidates *c, double z, double min_keep) {
  size_t n = c->list.count, count;
  uint64_t sum = 0, running = 0, least = min_keep > 1.0 ? (uint64_t)min_keep : 1;
  if (z >= 1.0 || n <= 2) {
    return;
  }
  weigh(c);
  for (int pass = 0; pass < 2; pass++) {
    uint64_t limit = times_weight(z, sum ? sum : n - 2, 0), each = pass && !sum;
    for (count = 0; count < n - 2; count++) {
      int64_t bend =
          (int64_t)(c->weight[count] - c->weight[count + 1]) - (int64_t)(c->weight[count + 1] - c->weight[count + 2]);
      running += each ? 1 : (uint64_t)(bend < 0 ? -bend : bend);
      if (pass && running > limit && count >= least) {
        break;
      }
    }
    sum = pass ? sum : running;
    running = 0;
  }
  keep_first(c, count < n - 2 ? count : n, 0.0);
}

/* ---- sigma ---- */

/* Sums of z - max and of its square, in sixteen lanes by id. */
struct spread {
  double sum[LANES], square[LANES];
};

SELDOM double across(const double lanes[LANES]) {
  double left[LANES];
  memcpy(left, lanes, sizeof left);
  for (size_t half = LANES / 2; half; half /= 2) {
    for (size_t i = 0; i < half; i++) {
      left[i] += left[i + half];
    }
  }
  return left[0];
}

SELDOM float sigma_bound(const struct spread *s, double count, float max, const double number[3]) {
  double mean = across(s->sum) / count;
  double variance = (across(s->square) - mean * mean * count) / (count - number[1]);
  return round_down((double)max - number[0] * __builtin_sqrt(variance > 0.0 ? variance : 0.0));
}

/* A list's entries in id order; `n` ids there are. */
SELDOM struct list in_id_order(const struct list *from, size_t n, char **scratch) {
  size_t blocks = (n + BLOCK - 1) / BLOCK;
  struct list to = list_in(scratch, from->count);
  char *rest = *scratch;
  uint64_t *is_there = (uint64_t *)take(&rest, blocks * sizeof *is_there);
  uint32_t *place = (uint32_t *)take(&rest, n * sizeof *place);
  memset(is_there, 0, blocks * sizeof *is_there);
  for (size_t i = 0; i < from->count; i++) {
    is_there[from->id[i] / BLOCK] |= (uint64_t)1 << from->id[i] % BLOCK;
    place[from->id[i]] = (uint32_t)i;
  }
  for (size_t b = 0; b < blocks; b++) {
    for (uint64_t left = is_there[b]; left; left &= left - 1) {
      size_t id = b * BLOCK + (size_t)__builtin_ctzll(left);
      push(&to, from->value[place[id]], id);
    }
  }
  return to;
}

SELDOM void near_candidates(struct candidates *c, const double number[3], size_t n, char *scratch) {
  if (!(number[0] > 0.0) || c->list.count <= 1) {
    return;
  }
  struct spread s;
  memset(&s, 0, sizeof s);
  const struct list list = in_id_order(&c->list, n, &scratch);
  for (size_t i = 0; i < list.count; i++) {
    double d = (double)list.value[i] - (double)c->max;
    s.sum[list.id[i] % LANES] += d;
    s.square[list.id[i] % LANES] += d * d;
  }
  keep_reaching(c, sigma_bound(&s, (double)list.count, c->max, number), 0.0);
}

/* ---- other values ---- */

/* What becomes of y: of quadratic, 0 - f y^2 (s |y| + k); of adaptive-p, 5 - 10 d^2 / (1 + d), d the distance of p from
   its target in units of 0.3. */
struct change {
  float max, inverse;
  float f, k, s;       /* f > 0: quadratic */
  float share, target; /* p = e * share */
};

INLINE vf changed(vf z, const struct change *how) {
  const vf one = v_set1(1.0f), largest = v_set1(FLT_MAX), zero = v_set1(0.0f);
  vf y = v_mul(v_sub(z, v_set1(how->max)), v_set1(how->inverse));
  if (how->f > 0.0f) {
    vf a = v_min(v_sub(zero, y), largest), b = v_add(v_mul(v_set1(how->s), a), v_set1(how->k));
    return v_max(v_sub(zero, v_mul(v_mul(v_mul(v_set1(how->f), a), a), b)), v_set1(-FLT_MAX));
  }
  vf off = v_sub(v_mul(v_exp(y), v_set1(how->share)), v_set1(how->target));
  vf d = v_mul(v_max(off, v_sub(zero, off)), v_set1((float)(1.0 / 0.3)));
  vf value = v_sub(v_set1(5.0f), v_div(v_mul(v_mul(v_set1(10.0f), d), d), v_add(one, d)));
  return v_max(value, v_set1(-FLT_MAX)); /* a NaN of a row that changes meanwhile has no rank in a list */
}

SELDOM struct change quadratic_change(const double number[3], float max, float inverse) {
  return (struct change){.max = max,
                         .inverse = inverse,
                         .f = (float)number[0],
                         .k = (float)((3.0 - number[1]) / 2.0),
                         .s = (float)((number[1] - 1.0) / 2.0)};
}

SELDOM struct change adaptive_change(const double number[3], const double state[2], uint64_t total, float max,
                                     float inverse) {
  double target = 2.0 * number[0] - state[0] / state[1];
  target = state[1] == 0.0 ? number[0] : target;
  target = target > 0.0 ? target : 0.0;
  return (struct change){.max = max,
                         .inverse = inverse,
                         .share = (float)(0x1p43 / (double)total),
                         .target = (float)(target < 1.0 ? target : 1.0)};
}

/* `n` ids there are; takes its place in scratch. */
SELDOM void change_candidates(struct candidates *c, const struct change *how, size_t n, char *scratch) {
  struct list by_id = in_id_order(&c->list, n, &scratch), spare = list_in(&scratch, by_id.count);
  for (size_t i = 0; i < by_id.count; i += LANES) {
    v_store(by_id.value + i, v_add(changed(v_load(by_id.value + i), how), v_set1(0.0f)));
  }
  sort_list(&by_id, &spare);
  memcpy(c->list.value, by_id.value, by_id.count * sizeof *by_id.value);
  memcpy(c->list.id, by_id.id, by_id.count * sizeof *by_id.id);
  c->max = c->list.value[0];
  c->temperature = 1.0;
  c->total = 0;
  c->is_prefix = 0;
}

/* ---- exclude top choices ---- */

enum { DOMAIN_XTC = 6 }; /* items: a program's coins, in its order */

static int xtc_acts(const double number[3], uint64_t coin, const struct philox_key *key) {
  uint64_t bits[LANES];
  uint32_t item[LANES] = {0};
  item[0] = (uint32_t)coin;
  random_bits16(bits, item, DOMAIN_XTC, key);
  return !(number[1] > 0.5) && small_to_double(bits[0] >> 12) * 0x1p-52 < number[0];
}

SELDOM void exclude_candidates(struct candidates *c, const double number[3]) {
  if (c->list.count < 2) {
    return;
  }
  weigh(c);
  size_t reach = count_weighing(c, share_limit(number[1], c->total));
  if (reach > 1 && (double)(c->list.count - (reach - 1)) >= number[2]) {
    keep_part(c, reach - 1, c->list.count);
  }
}

/* ---- mirostat ---- */

/* Basu et al., arXiv 2007.14966: how many to keep, if all follow Zipf's law as the first m do; `n` ids there are. */
SELDOM size_t mirostat_count(const struct candidates *c, double mu, double m, size_t n) {
  size_t first = min_size(c->list.count, m < 1e9 ? (size_t)m : 1000000000);
  double products = 0.0, squares = 0.0;
  for (size_t i = 0; i + 1 < first; i++) {
    double t = log_1(((double)i + 2.0) / ((double)i + 1.0));
    float y = y_of(c, i), next = y_of(c, i + 1);
    y = y < -FLT_MAX ? -FLT_MAX : y;
    next = next < -FLT_MAX ? -FLT_MAX : next;
    products += t * ((double)y - (double)next);
    squares += t * t;
  }
  double s = squares > 0.0 ? products / squares : 0.0, above = s - 1.0, log_n = log_1((double)n);
  double power = mu * LN2, below = 1.0 - exp_1(-above * log_n);
  power = exp_1(power > -700.0 ? power : -700.0);
  double x = above == 0.0 || below == 0.0 ? power / log_n : above * power / below;
  x = x > DBL_MIN ? x : DBL_MIN;
  x = x < DBL_MAX ? x : DBL_MAX;
  double k = s > 0.0 ? exp_1(log_1(x) / s) : x > 1.0 ? 1e300 : 0.0;
  return k >= (double)n ? n : k > 1.0 ? (size_t)k : 1;
}

/* Which share of all a candidate must have: 2^-mu; all of it and more if mu is not above 0. */
static double mirostat_share(double mu) { return mu > 0.0 ? exp_1(-mu * LN2) : 2.0; }

/* Order on logits, and exact selection in it: the k-th logit, or the one at which a mass is reached.

   The order is descending value, ties by ascending id; whatever a truncation keeps is a prefix of it. Selection is a
   radix over the ordered bits, from the highest bit in which what is left differs, 11 bits a pass: one pass for ties
   and near ties, three at most. */

/* Ascending unsigned keys in the order of the floats; both zeros are one value and get one key, with none beside it, so
   that neighbouring keys are neighbouring floats. */
INLINE uint32_t order_key(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u >> 31 ? 0u - u : u | 0x80000000u;
}
INLINE float key_value(uint32_t key) {
  uint32_t u = key >> 31 ? key & 0x7fffffffu : 0u - key;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

enum { HALVINGS = 8 };

/* least < the result <= most, in a search that tries so for the `round`th time. First it halves by value, as logits are
   spread: between the bits of a negative and a positive number there are all those near 0. What this does not get on
   with, it halves by ordered bits, which ends after 32 rounds whatever the values. */
static float between(float least, float most, int round) {
  float middle = least + (most - least) * 0.5f;
  uint32_t low = order_key(least), high = order_key(most);
  return round < HALVINGS && middle > least && middle <= most ? middle : key_value(low + (high - low + 1) / 2);
}

INLINE vu order_keys(vf x) {
  vu u = v_bits(v_add(x, v_set1(0.0f)));
  vm negative = v_gt(v_set1(0.0f), x);
  vf flipped = v_of_bits(u_add(u_xor(u, u_set1(0xffffffffu)), u_set1(1)));
  vf raised = v_of_bits(u_xor(u, u_set1(0x80000000u)));
  return v_bits(v_select(negative, flipped, raised));
}

/* Logits picked from a row, with their ids. */
struct list {
  float *value;
  uint32_t *id;
  size_t count;
};

INLINE struct list list_in(char **scratch, size_t capacity) {
  struct list list = {(float *)*scratch, NULL, 0};
  capacity = (capacity + 2 * LANES) / LANES * LANES; /* room for a whole vector behind the last entry */
  list.id = (uint32_t *)(list.value + capacity);
  *scratch = (char *)(list.id + capacity);
  return list;
}

INLINE void append(struct list *list, vf value, vu id, vm which) {
  u_compress(list->id + list->count, id, which);
  list->count += v_compress(list->value + list->count, value, which);
}

/* The ids of the vector at i. */
INLINE vu ids_from(size_t i) { return u_add(u_load(lane_numbers), u_set1((uint32_t)i)); }

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* Stable, descending. Sorts by the complement of the key, three passes; the result lands in value and id. */
static void radix_sort(float *value, uint32_t *id, float *value2, uint32_t *id2, size_t n) {
  static const int shifts[3] = {0, DIGIT_BITS, 2 * DIGIT_BITS};
  for (int pass = 0; pass < 3; pass++) {
    uint32_t start[DIGITS] = {0}, sum = 0;
    for (size_t i = 0; i < n; i++) {
      start[~order_key(value[i]) >> shifts[pass] & (DIGITS - 1)]++;
    }
    for (size_t d = 0; d < DIGITS; d++) {
      uint32_t count = start[d];
      start[d] = sum;
      sum += count;
    }
    for (size_t i = 0; i < n; i++) {
      uint32_t to = start[~order_key(value[i]) >> shifts[pass] & (DIGITS - 1)]++;
      value2[to] = value[i];
      id2[to] = id[i];
    }
    float *v = value;
    uint32_t *u = id;
    value = value2, value2 = v;
    id = id2, id2 = u;
  }
  memcpy(value2, value, n * sizeof *value); /* three swaps: the result is in the spare */
  memcpy(id2, id, n * sizeof *id);
}

/* What is kept of a row: ids with z > value, and those below `end` with z == value. */
struct prefix {
  float value;
  size_t end;
};

static const struct prefix everything = {-INFINITY, 0};

INLINE int is_longer(struct prefix a, struct prefix b) {
  return a.value < b.value || (a.value == b.value && a.end > b.end);
}
INLINE struct prefix longer(struct prefix a, struct prefix b) { return is_longer(a, b) ? a : b; }
INLINE struct prefix shorter(struct prefix a, struct prefix b) { return is_longer(a, b) ? b : a; }
INLINE int is_in(struct prefix p, float z, size_t id) { return z > p.value || (z == p.value && id < p.end); }

/* A prefix as bounds to reach: its value up to the vector in which ties end, the float above from there on. */
struct cut {
  vf bound[3]; /* before that vector, in it, behind it */
  size_t at;
};

static struct cut cut_of(struct prefix p) {
  size_t at = p.end / LANES * LANES;
  const vf tied = v_set1(p.value), rest = v_set1(key_value(order_key(p.value) + 1));
  return (struct cut){{tied, v_select(m_of_bits((1u << (p.end - at)) - 1u), tied, rest), rest}, at};
}

INLINE vm is_kept(const struct cut *c, size_t i, vf v) { return v_ge(v, c->bound[(i >= c->at) + (i > c->at)]); }

/* floor or ceil of x * weight for x in [0, 1), weight <= 2^63: exact, x is a 53-bit integer times a power of two */
INLINE uint64_t times_weight(double x, uint64_t weight, int round_up) {
  uint64_t u = double_bits(x), exponent = u >> 52;
  uint64_t mantissa = (u & 0x000fffffffffffffu) | (exponent ? 0x0010000000000000u : 0);
  unsigned shift = 1075u - (unsigned)(exponent ? exponent : 1); /* x = mantissa * 2^-shift */
  unsigned __int128 product = (unsigned __int128)mantissa * weight;
  if (shift > 127) {
    return round_up && product;
  }
  uint64_t whole = (uint64_t)(product >> shift);
  return whole + (round_up && product != (unsigned __int128)whole << shift);
}

/* What the mass before an id must be less than. Only a row that changes meanwhile weighs nothing: 1 even then. */
INLINE uint64_t top_p_limit(double top_p, uint64_t total) {
  uint64_t limit = top_p > 0.0 ? times_weight(top_p, total, 1) : 1;
  return limit ? limit : 1;
}

/* What a logit weighs: 1 each, or round(2^43 exp((z - max) * inverse)). */
struct weighing {
  int by_mass;
  float max, inverse;
  double top_p; /* by mass, if above 0: the share of the total to reach */
};

INLINE void weigh16(uint64_t w[LANES], vf z, const struct weighing *how) {
  if (how->by_mass) {
    w_store(w, v_exp(v_mul(v_sub(z, v_set1(how->max)), v_set1(how->inverse))));
  } else {
    for (int i = 0; i < LANES; i++) {
      w[i] = 1;
    }
  }
}

/* The digit, from the top, in which `limit` is reached; what lies above it is taken off limit. */
INLINE size_t digit_reaching(const uint64_t *mass, size_t digits, uint64_t *limit) {
  size_t d = digits - 1;
  while (d > 0 && mass[d] < *limit) {
    *limit -= mass[d--];
  }
  return d;
}

/* The entries at hand differ in their low bits only: a digit is what is left of key - least after a shift. */
struct digits {
  uint32_t least;
  int shift;
  float floor; /* the value of least: what is below, -inf, weighs nothing and counts as least */
};

INLINE vu digits_of(vf z, const struct digits *d) {
  vu key = order_keys(v_max(z, v_set1(d->floor)));
  return u_shr(u_add(key, u_set1(0u - d->least)), d->shift);
}

/* The least, but for what is ignored (NaN: nothing), and the most of z[0..n). */
static void extremes(const float *z, size_t n, float ignored, float *least, float *most) {
  vf low = v_set1(INFINITY), high = v_set1(-INFINITY), from = v_set1(ignored);
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(z + i) : v_load_n(z + i, n - i, z[i]);
    high = v_max(v, high);
    low = v_select(v_eq(v, from), low, v_min(v, low));
  }
  *least = -v_max_across(v_sub(v_set1(0.0f), low));
  *most = v_max_across(high);
}

static struct digits highest_digits(const float *z, size_t n, float ignored) {
  float low, high;
  extremes(z, n, ignored, &low, &high);
  struct digits d = {order_key(low), 0, low};
  while ((order_key(high) - d.least) >> d.shift >= DIGITS) {
    d.shift++;
  }
  return d;
}

static void add_masses(uint64_t mass[DIGITS], const float *z, size_t n, const struct digits *d,
                       const struct weighing *how) {
  uint64_t w[LANES];
  uint32_t digit[LANES];
  memset(mass, 0, DIGITS * sizeof *mass);
  for (size_t i = 0; i < n; i += LANES) {
    size_t lanes = min_size(LANES, n - i);
    vf v = v_load_n(z + i, lanes, -INFINITY);
    u_store(digit, digits_of(v, d));
    weigh16(w, v, how);
    for (size_t j = 0; j < lanes; j++) {
      mass[digit[j]] += w[j];
    }
  }
}

/* The entries of z with this digit into list, in order; id NULL numbers them from 0. z and id may be the list's own:
   what is stored never passes what has been read. */
static void gather_digit(struct list *list, const float *z, const uint32_t *id, size_t n, const struct digits *d,
                         size_t digit) {
  const vf floor = v_set1(d->floor);
  list->count = 0;
  for (size_t i = 0; i < n; i += LANES) {
    size_t lanes = min_size(LANES, n - i);
    vf v = v_load_n(z + i, lanes, NAN);
    vu ids = id ? u_load(id + i) : ids_from(i);
    append(list, v, ids, m_and(u_eq(digits_of(v, d), u_set1((uint32_t)digit)), v_ge(v, floor)));
  }
}

static uint64_t sum_of(const uint64_t mass[DIGITS]) {
  uint64_t sum = 0;
  for (size_t d = 0; d < DIGITS; d++) {
    sum += mass[d];
  }
  return sum;
}

/* The prefix that ends with the first entry at which the running weight reaches a limit of at least 1: the one given,
   or the share of the total that `how` names. */
static struct prefix select_weight(const float *z, size_t n, uint64_t limit, const struct weighing *how,
                                   char *scratch) {
  uint64_t mass[DIGITS], w[LANES];
  struct list list = list_in(&scratch, n);
  const float *left = z;
  size_t count = n;
  struct digits d;
  do {
    d = highest_digits(left, count, how->by_mass ? -INFINITY : NAN);
    add_masses(mass, left, count, &d, how);
    if (left == z && how->top_p > 0.0) {
      limit = top_p_limit(how->top_p, sum_of(mass));
    }
    gather_digit(&list, left, left == z ? NULL : list.id, count, &d, digit_reaching(mass, DIGITS, &limit));
    left = list.value;
    count = list.count;
  } while (d.shift > 0);
  /* all left are equal, of equal weight, in id order */
  weigh16(w, v_set1(left[0]), how);
  size_t ties = w[0] ? (size_t)((limit + w[0] - 1) / w[0]) : count;
  return (struct prefix){left[0], list.id[min_size(ties, count) - 1] + 1};
}

static struct prefix select_count(const float *z, size_t n, size_t k, char *scratch) {
  const struct weighing each = {0, 0.0f, 0.0f, 0.0};
  return select_weight(z, n, k, &each, scratch);
}

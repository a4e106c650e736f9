/* Order on logits, and exact selection in it: the k-th logit, or the one at which a mass is reached.

   The order is descending value, ties by ascending id; whatever a truncation keeps is a prefix of it. Selection is a
   radix over the 32 ordered bits in digits of 11, 11 and 10: three passes at most, whatever the values. */

/* Ascending unsigned keys in the order of the floats; both zeros are one value and get one key. */
INLINE uint32_t order_key(float x) {
  uint32_t u;
  x += 0.0f;
  memcpy(&u, &x, 4);
  return u >> 31 ? ~u : u | 0x80000000u;
}
INLINE float key_value(uint32_t key) {
  uint32_t u = key >> 31 ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &u, 4);
  return x;
}
INLINE vu order_keys(vf x) {
  vu u = v_bits(v_add(x, v_set1(0.0f)));
  vm negative = v_gt(v_set1(0.0f), x);
  vf flipped = v_of_bits(u_xor(u, u_set1(0xffffffffu))), raised = v_of_bits(u_xor(u, u_set1(0x80000000u)));
  return v_bits(v_select(negative, flipped, raised));
}

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS, TOP_SHIFT = 21, MIDDLE_SHIFT = 10 };

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

/* Kept are the ids with z > value, and those with z == value up to last_tie. */
struct prefix {
  float value;
  size_t last_tie;
};

INLINE int is_longer(struct prefix a, struct prefix b) {
  return a.value < b.value || (a.value == b.value && a.last_tie > b.last_tie);
}

/* What a logit weighs: 1 each, or round(2^43 exp((z - max) * inverse)). */
struct weighing {
  int by_mass;
  float max, inverse;
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

static int all_equal(const float *value, size_t n) {
  for (size_t i = 1; i < n; i++) {
    if (value[i] != value[0]) {
      return 0;
    }
  }
  return 1;
}

/* The digit, from the top, in which `limit` is reached; what lies above it is taken off limit. */
INLINE size_t digit_reaching(const uint64_t *mass, size_t digits, uint64_t *limit) {
  size_t d = digits - 1;
  while (d > 0 && mass[d] < *limit) {
    *limit -= mass[d--];
  }
  return d;
}

/* Adds the weight of every z to mass[its digit]. Runs of one digit are summed first: ties would wait for their store.
 */
static void add_masses(uint64_t *mass, const float *z, size_t n, int shift, uint32_t digits,
                       const struct weighing *how) {
  uint64_t w[LANES], running = 0;
  uint32_t key[LANES], last = 0;
  for (size_t i = 0; i < n; i += LANES) {
    size_t lanes = min_size(LANES, n - i);
    vf v = v_load_n(z + i, lanes, -INFINITY);
    u_store(key, order_keys(v));
    weigh16(w, v, how);
    for (size_t j = 0; j < lanes; j++) {
      uint32_t digit = key[j] >> shift & (digits - 1);
      if (digit != last) {
        mass[last] += running;
        running = 0;
        last = digit;
      }
      running += w[j];
    }
  }
  mass[last] += running;
}

/* The entries of z whose digits from `shift` up are `prefix`, in order; id NULL numbers them from 0. May be in place.
 */
static size_t gather_digit(const float *z, const uint32_t *id, size_t n, int shift, uint32_t prefix, float *value,
                           uint32_t *to) {
  size_t count = 0;
  for (size_t i = 0; i < n; i += LANES) {
    size_t lanes = min_size(LANES, n - i);
    vf v = v_load_n(z + i, lanes, -INFINITY);
    unsigned hits = m_bits(u_eq(u_shr(order_keys(v), shift), u_set1(prefix))) & ((1u << lanes) - 1u);
    for (; hits; hits &= hits - 1) {
      size_t j = i + (size_t)__builtin_ctz(hits);
      value[count] = z[j];
      to[count++] = id ? id[j] : (uint32_t)j;
    }
  }
  return count;
}

/* The prefix that ends with the first entry at which the running weight reaches limit. 0 < limit <= total weight. */
static struct prefix select_weight(const float *z, size_t n, uint64_t limit, const struct weighing *how,
                                   char *scratch) {
  static const int shifts[3] = {TOP_SHIFT, MIDDLE_SHIFT, 0};
  uint64_t mass[DIGITS], w[LANES];
  float *value = (float *)scratch;
  uint32_t *id = (uint32_t *)(value + (n + 2 * LANES) / LANES * LANES), prefix = 0;
  const float *left = z;
  size_t count = n;
  for (int pass = 0, bits = 32; pass < 3; pass++) {
    uint32_t digits = 1u << (bits - shifts[pass]);
    memset(mass, 0, digits * sizeof *mass);
    add_masses(mass, left, count, shifts[pass], digits, how);
    prefix = prefix * digits + (uint32_t)digit_reaching(mass, digits, &limit);
    count = gather_digit(left, pass ? id : NULL, count, shifts[pass], prefix, value, id);
    left = value;
    bits = shifts[pass];
    if (all_equal(value, count)) {
      break;
    }
  }
  /* all left are equal, of equal weight, in id order */
  weigh16(w, v_set1(value[0]), how);
  size_t ties = w[0] ? (size_t)((limit + w[0] - 1) / w[0]) : count;
  return (struct prefix){value[0], id[min_size(ties, count) - 1]};
}

static struct prefix select_count(const float *z, size_t n, size_t k, char *scratch) {
  const struct weighing each = {0, 0.0f, 0.0f};
  return select_weight(z, n, k, &each, scratch);
}

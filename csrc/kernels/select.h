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

/* The digit, from the top, in which `limit` is reached; what lies above it is taken off limit. */
INLINE size_t digit_reaching(const uint64_t *mass, size_t digits, uint64_t *limit) {
  size_t d = digits - 1;
  while (d > 0 && mass[d] < *limit) {
    *limit -= mass[d--];
  }
  return d;
}

/* The prefix that ends with the first entry at which the running weight reaches limit. 0 < limit <= total weight. */
static struct prefix select_weight(const float *z, size_t n, uint64_t limit, const struct weighing *how,
                                   char *scratch) {
  uint64_t mass[DIGITS] = {0}, w[LANES];
  uint32_t key[LANES];
  float *value = (float *)scratch;
  size_t room = (n + 2 * LANES) / LANES * LANES, count = 0;
  uint32_t *id = (uint32_t *)(value + room);
  for (size_t i = 0; i < n; i += LANES) {
    size_t lanes = min_size(LANES, n - i);
    vf v = v_load_n(z + i, lanes, -INFINITY);
    u_store(key, u_shr(order_keys(v), TOP_SHIFT));
    weigh16(w, v, how);
    for (size_t j = 0; j < lanes; j++) {
      mass[key[j]] += w[j];
    }
  }
  uint32_t prefix = (uint32_t)digit_reaching(mass, DIGITS, &limit);
  for (size_t i = 0; i < n; i += LANES) {
    size_t lanes = min_size(LANES, n - i);
    vf v = v_load_n(z + i, lanes, -INFINITY);
    unsigned hits = m_bits(u_eq(u_shr(order_keys(v), TOP_SHIFT), u_set1(prefix))) & ((1u << lanes) - 1u);
    for (; hits; hits &= hits - 1) {
      size_t j = i + (size_t)__builtin_ctz(hits);
      value[count] = z[j];
      id[count++] = (uint32_t)j;
    }
  }
  static const int shifts[2] = {MIDDLE_SHIFT, 0}, bits[2] = {DIGIT_BITS, MIDDLE_SHIFT};
  uint64_t tie_weight = 1;
  for (int pass = 0; pass < 2; pass++) {
    size_t kept = 0, digits = (size_t)1 << bits[pass];
    memset(mass, 0, digits * sizeof *mass);
    for (size_t i = 0; i < count; i += LANES) {
      size_t lanes = min_size(LANES, count - i);
      weigh16(w, v_load_n(value + i, lanes, -INFINITY), how);
      for (size_t j = 0; j < lanes; j++) {
        mass[order_key(value[i + j]) >> shifts[pass] & (digits - 1)] += w[j];
      }
    }
    uint32_t digit = (uint32_t)digit_reaching(mass, digits, &limit);
    prefix = prefix << bits[pass] | digit;
    for (size_t i = 0; i < count; i++) {
      if ((order_key(value[i]) >> shifts[pass] & (digits - 1)) == digit) {
        value[kept] = value[i];
        id[kept++] = id[i];
      }
    }
    count = kept;
    tie_weight = count ? mass[digit] / count : 1;
  }
  /* all left are equal, of equal weight, in id order */
  size_t ties = tie_weight ? (size_t)((limit + tie_weight - 1) / tie_weight) : count;
  return (struct prefix){key_value(prefix), id[min_size(ties, count) - 1]};
}

static struct prefix select_count(const float *z, size_t n, size_t k, char *scratch) {
  const struct weighing each = {0, 0.0f, 0.0f};
  return select_weight(z, n, k, &each, scratch);
}

/* top_k and argmax, exact, ties to the lowest id.

   Fast path: the maxima of blocks of 64, a bound t that k to 1.25 k of them reach (so at least k logits reach it), then
   only those blocks are read again (judged.h); what is greater than t and what equals it are kept apart, equals capped
   at k. Exact path, when k exceeds the number of blocks or when forced: select the k-th by radix (select.h). */

enum { COUNTABLE = 1 << 24 }; /* floats count exactly up to here */

/* How many of v[0..n) reach t, n <= COUNTABLE rounded up to whole vectors, the padding NaN. */
static size_t count_reaching(const float *v, size_t n, float t) {
  const vf bound = v_set1(t), one = v_set1(1.0f);
  vf acc[2] = {v_set1(0), v_set1(0)};
  for (size_t i = 0; i < n; i += LANES) {
    acc[i / LANES % 2] = v_add(acc[i / LANES % 2], v_keep(v_ge(v_load(v + i), bound), one));
  }
  return (size_t)v_sum_across(v_add(acc[0], acc[1]));
}

enum { GROUPS = 256 };

/* The largest of v's entries i, i + GROUPS, i + 2 GROUPS, ...: neighbours, alike in a sorted row, are in other groups.
 */
static void largest_of_groups(float largest[GROUPS], const float *v, size_t n) {
  for (size_t i = 0; i < GROUPS; i += LANES) {
    vf most = v_set1(-INFINITY);
    for (size_t j = i; j < n; j += GROUPS) {
      most = v_max(v_load(v + j), most);
    }
    v_store(largest + i, most);
  }
}

/* A t that at least k and, unless ties forbid it, at most `enough` of v[0..n) reach; k <= n. What k groups reach k
   entries do, and mostly few more: of many entries the groups are bisected first. */
static float bound_reached(const float *v, size_t n, size_t k, size_t enough) {
  float least, most, largest[GROUPS], known = -INFINITY;
  size_t reached = n;
  if (n >= 3 * GROUPS / 2 && k <= GROUPS / 4) {
    largest_of_groups(largest, v, n);
    known = bound_reached(largest, GROUPS, k, k + (enough - k) / 2);
    reached = count_reaching(v, n, known);
    if (reached <= enough) {
      return known;
    }
  }
  extremes(v, n, NAN, &least, &most);
  least = known > least ? known : least;
  if (least == -INFINITY) { /* as behind a mask: what is above it lies close together */
    reached = count_reaching(v, n, -FLT_MAX);
    if (reached < k) {
      return -INFINITY;
    }
    extremes(v, n, -INFINITY, &least, &most);
  }
  for (int round = 0; reached > enough && least < most; round++) { /* k reach least; fewer reach what is above most */
    float middle = between(least, most, round);
    size_t count = count_reaching(v, n, middle);
    if (count >= k) {
      least = middle;
      reached = count;
    } else {
      most = key_value(order_key(middle) - 1);
    }
  }
  return least;
}

/* v's entries above t, and those equal to it while there are fewer than k. */
INLINE void split(vf v, vu id, float t, size_t k, struct list *above, struct list *equal) {
  vm eq = v_eq(v, v_set1(t));
  append(above, v, id, v_gt(v, v_set1(t))); /* often empty, but a wrong guess costs more than the packing */
  if (m_bits(eq) && equal->count < k) {
    append(equal, v, id, eq);
    equal->count = min_size(equal->count, k);
  }
}

/* Of list, whose last vector is padded with NaN, in id order: what exceeds t, and up to k of what equals it. */
static void split_list(const struct list *list, float t, size_t k, struct list *above, struct list *equal) {
  for (size_t i = 0; i < list->count; i += LANES) {
    split(v_load(list->value + i), u_load(list->id + i), t, k, above, equal);
  }
}

INLINE void push(struct list *list, float value, size_t id) {
  list->value[list->count] = value;
  list->id[list->count++] = (uint32_t)id;
}

/* A block's logits that reach t, a bit each. */
INLINE uint64_t reaching64(const float z[BLOCK], float t) {
  const vf bound = v_set1(t);
  uint64_t hits = 0;
  for (size_t i = 0; i < 4; i++) {
    hits |= (uint64_t)m_bits(v_ge(v_load(z + LANES * i), bound)) << LANES * i;
  }
  return hits;
}

/* The same of a row's block, as it is judged, of what is allowed. */
INLINE uint64_t allowed_reaching(const struct judged *j, size_t block, float t) {
  size_t first = block * BLOCK;
  uint64_t allowed = allowed64(&j->mask, first), edited = j->is_edited ? j->is_edited[block] : 0;
  const vf bound = v_set1(t);
  vf v[4];
  row_load64(v, j->x, first, j->n, (int)j->dtype, -INFINITY);
  uint64_t hits = 0;
  for (size_t i = 0; i < 4; i++) {
    hits |= (uint64_t)m_bits(v_ge(v[i], bound)) << LANES * i;
  }
  hits &= ~edited;
  for (uint64_t left = edited; left; left &= left - 1) {
    size_t i = (size_t)__builtin_ctzll(left);
    hits |= (uint64_t)(j->edited[j->slot[first + i]] >= t) << i;
  }
  hits &= allowed;
  return j->n - first < BLOCK ? hits & (((uint64_t)1 << (j->n - first)) - 1) : hits;
}

/* The blocks whose maximum reaches t, asked for; `block` has room for a vector more than there are. Ties let more than
   1.25 k of them reach t only if fewer than k exceed it: behind 2 k, k that equal it are there, and it takes no more.
 */
static size_t expect_blocks(uint32_t *block, const struct judged *j, float t, size_t k) {
  const vf bound = v_set1(t);
  size_t count = 0;
  for (size_t b = 0; b < j->blocks; b += LANES) {
    vf maxima = v_load(j->maxima + b);
    count += u_compress(block + count, ids_from(b), count < 2 * k ? v_ge(maxima, bound) : v_gt(maxima, bound));
  }
  for (size_t i = 0; i < count; i++) {
    if (j->maxima[block[i]] > t) { /* of ties the first blocks do, and they may be neighbours */
      expect_block(j, block[i]);
    }
  }
  return count;
}

/* Of a row, skipping blocks whose maximum does not reach t: what exceeds t, and up to k of what equals it; none of what
   is -inf if a mask left fewer than k others, for that is never chosen. */
static void split_row(const struct judged *j, float t, size_t k, struct list *above, struct list *equal,
                      char *scratch) {
  uint32_t *blocks = (uint32_t *)take(&scratch, (j->blocks + LANES) * sizeof *blocks);
  size_t ties = t == -INFINITY && j->mask.kind != MASK_NONE ? 0 : k, count = expect_blocks(blocks, j, t, k);
  for (size_t i = 0; i < count; i++) {
    size_t block = blocks[i];
    if (equal->count >= ties && j->maxima[block] == t) {
      continue;
    }
    const float *there = block_in_place(j, block);
    for (uint64_t ids = there ? reaching64(there, t) : allowed_reaching(j, block, t); ids; ids &= ids - 1) {
      size_t within = (size_t)__builtin_ctzll(ids), id = block * BLOCK + within;
      float z = there ? there[within] : judged_logit(j, id);
      if (z > t) {
        push(above, z, id);
      } else if (z == t && equal->count < ties) { /* a NaN, which no list may have, is there only since just now */
        push(equal, z, id);
      }
    }
  }
}

enum { RANKED = 128 }; /* up to here counting ranks is the faster sort */

/* How many of z[0..n) come before each of the sixteen from i on: what is greater, and the equal ones with a lower
 * index. */
static vf ranks16(const float *z, size_t n, size_t i) {
  const vf one = v_set1(1.0f), mine = v_load(z + i);
  vf rank = v_set1(0);
  size_t j = 0;
  for (; j < i; j++) {
    rank = v_add(rank, v_keep(v_ge(v_set1(z[j]), mine), one));
  }
  for (; j < min_size(i + LANES, n); j++) {
    vf other = v_set1(z[j]);
    vm later = m_of_bits(0xfffeu << (j - i));
    rank = v_add(rank, v_keep(m_or(v_gt(other, mine), m_and(v_eq(other, mine), later)), one));
  }
  for (; j < n; j++) {
    rank = v_add(rank, v_keep(v_gt(v_set1(z[j]), mine), one));
  }
  return rank;
}

/* Descending, stable. Few: each entry's rank is counted. Many: radix by order key. */
static void sort_list(struct list *list, struct list *spare) {
  size_t n = list->count;
  if (n > RANKED) {
    radix_sort(list->value, list->id, spare->value, spare->id, n);
    return;
  }
  float rank[RANKED];
  for (size_t i = 0; i < n; i += LANES) {
    v_store(rank + i, ranks16(list->value, n, i));
  }
  for (size_t i = 0; i < n; i++) {
    size_t r = (size_t)rank[i];
    spare->value[r] = list->value[i];
    spare->id[r] = list->id[i];
  }
  memcpy(list->value, spare->value, n * sizeof *list->value);
  memcpy(list->id, spare->id, n * sizeof *list->id);
}

/* All of a row, as a list with room for a vector behind it. */
static struct list list_row(const struct judged *j, char **scratch) {
  struct list all = list_in(scratch, j->blocks * BLOCK);
  for (size_t b = 0; b < j->blocks; b++) {
    float *to = all.value + b * BLOCK;
    const float *z = block_of(j, b, to);
    if (z != to) {
      memcpy(to, z, BLOCK * sizeof *to);
    }
    for (size_t i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES) {
      u_store(all.id + i, ids_from(i));
    }
  }
  all.count = j->n;
  return all;
}

/* Of list, in id order, the k first and at most a few more: above what is sure to be among them, equal what ties at the
   edge of it. */
static void cut_list(struct list *list, size_t k, size_t enough, struct list *above, struct list *equal) {
  for (size_t i = list->count; i < list->count + LANES; i++) { /* padded as bound_reached wants it */
    list->value[i] = NAN;
  }
  split_list(list, bound_reached(list->value, list->count, k, enough), k, above, equal);
}

/* The k first of a row whose maxima are known, in order: candidates by a bound that at least k reach, which their
   blocks' maxima tell if there are blocks enough, sorted and cut. */
static struct list first_of(const struct judged *j, size_t k, char **scratch) {
  struct list all = list_in(scratch, j->blocks * BLOCK + k), equal = list_in(scratch, k),
              spare = list_in(scratch, j->blocks * BLOCK);
  size_t enough = k + k / 4 > RANKED ? k + k / 4 : RANKED;
  if (k > j->blocks) {
    struct list row = list_row(j, scratch);
    cut_list(&row, k, enough, &all, &equal);
  } else {
    split_row(j, bound_reached(j->maxima, j->blocks, k, k + k / 4), k, &all, &equal, *scratch);
  }
  if (all.count > enough) { /* blocks had more than one, or few blocks had any */
    struct list above = spare;
    equal.count = 0;
    cut_list(&all, k, enough, &above, &equal);
    spare = all;
    all = above;
  }
  sort_list(&all, &spare);
  equal.count = all.count < k ? min_size(equal.count, k - all.count) : 0;
  memcpy(all.value + all.count, equal.value, equal.count * sizeof *all.value);
  memcpy(all.id + all.count, equal.id, equal.count * sizeof *all.id);
  all.count = min_size(all.count + equal.count, k);
  return all;
}

/* The prefix that a list of the first in order is. */
INLINE struct prefix last_of(const struct list *list) {
  return (struct prefix){list->value[list->count - 1], list->id[list->count - 1] + 1};
}

static struct prefix first_prefix(const struct judged *j, size_t k, char *scratch) {
  const struct list first = first_of(j, k, &scratch);
  return last_of(&first);
}

/* By radix, whatever the row: what the other way must agree with. */
INLINE struct list top_k_exact(const void *x, size_t n, int dtype, size_t k, char *scratch) {
  float *z = (float *)take(&scratch, (n + LANES) * sizeof *z);
  for (size_t i = 0; i < n; i += LANES) { /* a NaN is there only if the row changes meanwhile: selection must end */
    vf v = n - i >= LANES ? row_load(x, i, dtype) : row_load_n(x, i, n - i, dtype, -INFINITY);
    v_store(z + i, v_select(v_unord(v, v), v_set1(-INFINITY), v));
  }
  for (size_t i = n; i % LANES; i++) {
    z[i] = NAN; /* reaches no bound */
  }
  float t = select_count(z, n, k, scratch).value;
  struct list all = list_in(&scratch, n + k), equal = list_in(&scratch, k), spare = list_in(&scratch, n);
  for (size_t i = 0; i < n; i += LANES) {
    split(v_load(z + i), ids_from(i), t, k, &all, &equal);
  }
  sort_list(&all, &spare);
  memcpy(all.value + all.count, equal.value, (k - all.count) * sizeof *all.value);
  memcpy(all.id + all.count, equal.id, (k - all.count) * sizeof *all.id);
  all.count = k;
  return all;
}

static void put_list(float *values, int64_t *ids, const struct list *list) {
  for (size_t i = 0; i < list->count; i++) {
    values[i] = list->value[i];
    ids[i] = list->id[i];
  }
}

/* With ties="all": what equals the k-th value behind the k found, as far as the row has room. Returns how many
   entries there are in all. */
INLINE int64_t add_ties(const void *x, size_t n, int dtype, float *values, int64_t *ids, size_t k, size_t width) {
  size_t count = k;
  float t = values[k - 1];
  int64_t last = ids[k - 1];
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? row_load(x, i, dtype) : row_load_n(x, i, n - i, dtype, NAN);
    float value[LANES];
    v_store(value, v);
    for (unsigned hits = m_bits(v_eq(v, v_set1(t))); hits; hits &= hits - 1) {
      unsigned lane = (unsigned)__builtin_ctz(hits);
      if ((int64_t)(i + lane) > last) {
        if (count < width) {
          values[count] = value[lane];
          ids[count] = (int64_t)(i + lane);
        }
        count++;
      }
    }
  }
  return (int64_t)count;
}

INLINE void top_k_rows(const struct top_k_args *a, void *scratch, int dtype) {
  size_t n = (size_t)a->cols, k = (size_t)a->k, width = (size_t)a->width, blocks = (n + BLOCK - 1) / BLOCK;
  FOR_ROWS (r, a) {
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    float *values = (float *)a->values.ptr + width * (size_t)r;
    int64_t *ids = (int64_t *)a->ids.ptr + width * (size_t)r, *status = (int64_t *)a->status.ptr + r;
    char *rest = scratch;
    struct judged row = plain_row(x, n, dtype, (float *)take(&rest, (blocks + LANES) * sizeof(float)));
    int has_nan = 0;
    find_maxima(&row, &has_nan);
    if (has_nan) {
      *status = -1;
      fill(values, width, v_max_across(QUIET_NAN));
      for (size_t i = 0; i < width; i++) {
        ids[i] = -1;
      }
      continue;
    }
    struct list first = a->force_exact || n > COUNTABLE ? top_k_exact(x, n, dtype, k, rest) : first_of(&row, k, &rest);
    put_list(values, ids, &first);
    int all = first.count == k; /* fewer only if the row changes meanwhile */
    *status = all && a->ties_all ? add_ties(x, n, dtype, values, ids, k, width) : (int64_t)first.count;
    for (size_t i = min_size((size_t)*status, width); i < width; i++) {
      values[i] = -INFINITY;
      ids[i] = -1;
    }
  }
}

/* The first of the largest. It chooses, so a row with a NaN or +inf, or with nothing above -inf, is invalid. */
INLINE void argmax_rows(const struct top_k_args *a, void *scratch, int dtype) {
  (void)scratch;
  size_t n = (size_t)a->cols;
  FOR_ROWS (r, a) {
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    int64_t *id = (int64_t *)a->ids.ptr + r, *status = (int64_t *)a->status.ptr + r;
    float best = -INFINITY;
    size_t where = 0;
    int has_nan = 0;
    for (size_t i = 0; i < n; i += SUM_BLOCK) {
      float m = block_max(x, i, min_size(i + SUM_BLOCK, n), dtype, &has_nan);
      if (m > best) {
        best = m;
        where = i;
      }
    }
    int valid = !has_nan && best > -INFINITY && best < INFINITY;
    size_t size = dtype_size(dtype);
    *status = valid ? 1 : -1;
    *id = valid ? (int64_t)(where + first_equal((const char *)x + where * size, n - where, dtype, best)) : -1;
  }
}

static void top_k(const struct top_k_args *a, void *scratch) { FOR_DTYPE(top_k_rows, a, scratch) }
static void argmax(const struct top_k_args *a, void *scratch) { FOR_DTYPE(argmax_rows, a, scratch) }

/* Truncation when top-k comes first: the k logits are picked from the row, and what follows sees no others. They stand
   in descending order, so every step keeps a first part of them. */

struct few {
  struct list list;
  uint64_t *weight; /* of each, at the temperature of the step */
  float max, inverse;
};

/* The k first of z, k <= blocks, of those allowed; z may be the user's row: nothing beyond n is read. */
static void pick_few(struct few *f, const float *z, size_t n, const float *maxima, size_t k, char *scratch) {
  struct list equal;
  top_k_by_blocks(z, n, DTYPE_F32, maxima, k, scratch, &f->list, &equal);
  memcpy(f->list.value + f->list.count, equal.value, equal.count * sizeof *equal.value);
  memcpy(f->list.id + f->list.count, equal.id, equal.count * sizeof *equal.id);
  f->list.count += equal.count;
  while (f->list.count > 1 && f->list.value[f->list.count - 1] == -INFINITY) {
    f->list.count--;
  }
  f->max = f->list.value[0];
}

static uint64_t weigh_few(struct few *f) {
  const struct weighing how = {1, f->max, f->inverse, 0.0};
  uint64_t total = 0;
  for (size_t i = 0; i < f->list.count; i += LANES) {
    weigh16(f->weight + i, v_load(f->list.value + i), &how);
  }
  for (size_t i = 0; i < f->list.count; i++) {
    total += f->weight[i];
  }
  return total;
}

static size_t top_p_of_few(struct few *f, double top_p) {
  uint64_t limit = top_p_limit(top_p, weigh_few(f)), before = 0;
  size_t kept = 0;
  while (kept < f->list.count && before < limit) {
    before += f->weight[kept++];
  }
  return kept;
}

static size_t min_p_of_few(const struct few *f, double min_p, double temperature) {
  float bound = min_p_bound(min_p, f->max, temperature);
  size_t kept = 0;
  while (kept < f->list.count && f->list.value[kept] >= bound) {
    kept++;
  }
  return kept;
}

static void truncate_few(struct few *f, const struct sample_args *a, const struct sample_params *p,
                         double temperature) {
  double current = 1.0;
  f->inverse = 1.0f;
  for (int i = 0; i < STEP_LIMIT && a->steps[i]; i++) {
    size_t kept = f->list.count;
    if (a->steps[i] == STEP_TEMPERATURE) {
      current = temperature;
      f->inverse = (float)(1.0 / temperature);
    } else if (a->steps[i] == STEP_TOP_P && p->top_p < 1.0) {
      kept = top_p_of_few(f, p->top_p);
    } else if (a->steps[i] == STEP_MIN_P && p->min_p > 0.0) {
      kept = min_p_of_few(f, p->min_p, current);
    }
    size_t least = min_size((size_t)p->min_keep, f->list.count);
    f->list.count = kept > least ? kept : least;
  }
}

/* Puts the list back into a row that is -inf elsewhere, as far as a draw looks: maxima everywhere, z in their blocks.
 */
static void spread_few(const struct few *f, float *z, float *maxima, size_t n) {
  size_t blocks = (n + BLOCK - 1) / BLOCK;
  fill(maxima, blocks, -INFINITY);
  for (size_t i = 0; i < f->list.count; i++) {
    size_t id = f->list.id[i], block = id / BLOCK;
    if (maxima[block] == -INFINITY) { /* the first of a block is its largest */
      maxima[block] = f->list.value[i];
      fill(z + block * BLOCK, BLOCK, -INFINITY);
    }
    z[id] = f->list.value[i];
  }
}

/* Whether the first truncation that does anything is a top-k that pick_few can serve; k of it, else 0. */
INLINE size_t few_first(const struct sample_args *a, const struct sample_params *p, size_t n) {
  if (a->force_exact || a->ties_all || a->has_u) {
    return 0;
  }
  for (int i = 0; i < STEP_LIMIT && a->steps[i]; i++) {
    if (a->steps[i] == STEP_TOP_K && top_k_of(p, n)) {
      size_t k = top_k_of(p, n);
      return k <= (n + BLOCK - 1) / BLOCK ? k : 0;
    }
    if ((a->steps[i] == STEP_TOP_P && p->top_p < 1.0) || (a->steps[i] == STEP_MIN_P && p->min_p > 0.0)) {
      return 0;
    }
  }
  return 0;
}

/* Truncation when top-k comes first: the k logits are picked from the row, and what follows sees no others. They stand
   in descending order, so every step keeps a first part of them. */

struct few {
  struct list list;
  uint64_t *weight; /* of each, at the temperature of the step */
  float max, inverse;
};

/* The k first of those allowed. */
static struct few pick_few(const struct judged *j, size_t k, char **scratch) {
  struct few f = {.list = first_of(j, k, scratch), .max = j->max, .inverse = 1.0f};
  while (f.list.count > 1 && f.list.value[f.list.count - 1] == -INFINITY) {
    f.list.count--;
  }
  f.weight = (uint64_t *)take(scratch, (f.list.count + LANES) * sizeof *f.weight);
  return f;
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

/* How many pick_few is to pick, if top-k comes before what needs to see all of the row, else 0. A min-p before it keeps
   a prefix that does not depend on what top-k keeps, so the two may change places. A k of many, with nothing to follow,
   is better left to a count of what comes before winners (sample.h). */
INLINE size_t few_first(const struct sample_args *a, const struct sample_params *p, size_t n) {
  for (int i = 0; i < STEP_LIMIT && a->steps[i] && !(a->ties_all & TIES_TOP_P); i++) {
    if (a->steps[i] == STEP_TOP_K && top_k_of(p, n)) {
      size_t k = top_k_of(p, n);
      return k <= (n + BLOCK - 1) / BLOCK || p->top_p < 1.0 || a->support_ids.ptr ? k : 0;
    }
    if (a->steps[i] == STEP_TOP_P && p->top_p < 1.0) {
      return 0;
    }
  }
  return 0;
}

/* Picks k; whether they are all that top-k keeps. With ties it keeps what equals the last, so one more is looked at. */
static int pick_all_few(struct few *f, const struct judged *j, const struct sample_args *a, size_t k, char **scratch) {
  *f = pick_few(j, k + (a->ties_all != 0), scratch);
  size_t picked = f->list.count;
  f->list.count = min_size(picked, k);
  return picked <= k || f->list.value[k] < f->list.value[k - 1];
}

/* The draw from the first `count` of f's list. */
static size_t draw_few(const struct few *f, const struct judged *j, double temperature, const struct philox_key *key) {
  size_t count = f->list.count;
  if (count == 1) { /* whatever its noise */
    return f->list.id[0];
  }
  if (count <= FEW) {
    return best_of_few(f->list.value, f->list.id, count, temperature, key).id;
  }
  return gumbel_argmax(j, last_of(&f->list), temperature, key).id;
}

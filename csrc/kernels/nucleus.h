/* The nucleus itself, for those who want all of it: the prefix at which the mass reaches top_p of the total.

   A sample of the row gives thresholds in order. Rough masses of what lies above them say of all but a few whether the
   nucleus ends above or below; what is left between two neighbours, a few per cent of the row, is gathered and selected
   from by exact weights (select.h), given the exact mass above it. Thresholds are never trusted, only asked about: a
   bad sample makes the gathered part longer, up to the whole row, and nothing wrong. */

enum { THRESHOLDS = RANKED, CLOSE = 4, NOT_ASKED = UNDECIDED + 1 };

struct thresholds {
  float value[THRESHOLDS + 2 * LANES]; /* descending */
  uint8_t verdict[THRESHOLDS];         /* on whatever lies right below the threshold */
  size_t count;
};

/* A logit from each of so many stretches of the row, at changing places in them, where it is one of the total. */
static void sample_thresholds(struct thresholds *t, const struct nucleus *n) {
  const struct judged *j = n->row;
  float value[THRESHOLDS + 2 * LANES], rank[THRESHOLDS];
  t->count = 0;
  for (size_t i = 0; i < THRESHOLDS; i++) {
    size_t stretch = j->n / THRESHOLDS, id = i * stretch + i * 2654435761u % stretch;
    float room[BLOCK], z = block_of(j, id / BLOCK, room)[id % BLOCK];
    value[t->count] = z;
    t->count += is_in(n->of, z, id);
  }
  for (size_t i = 0; i < t->count; i += LANES) {
    v_store(rank + i, ranks16(value, t->count, i));
  }
  for (size_t i = 0; i < t->count; i++) {
    t->value[(size_t)rank[i]] = value[i];
  }
  memset(t->verdict, NOT_ASKED, sizeof t->verdict);
}

static enum verdict ask(struct thresholds *t, struct nucleus *n, size_t i) {
  if (t->verdict[i] == NOT_ASKED) {
    t->verdict[i] = (uint8_t)by_rough_mass(n, rough_mass(n->row, (struct prefix){t->value[i], 0}, n->inverse));
  }
  return (enum verdict)t->verdict[i];
}

/* The nucleus ends in `low` but not in `high`. */
struct bracket {
  struct prefix high, low;
};

static struct bracket narrow(struct nucleus *n) {
  struct bracket b = {{INFINITY, 0}, n->of};
  struct thresholds t;
  if (n->row->n < THRESHOLDS * BLOCK) {
    return b;
  }
  sample_thresholds(&t, n);
  size_t inside = 0, limit = t.count, outside = t.count; /* inside: how many first ones surely are */
  while (limit - inside > CLOSE) {
    size_t middle = inside + (limit - inside) / 2;
    enum verdict verdict = ask(&t, n, middle);
    if (verdict == INSIDE) {
      inside = middle + 1;
    } else {
      limit = middle;
      outside = verdict == OUTSIDE ? middle : outside;
    }
  }
  for (size_t low = limit; outside > low + CLOSE;) { /* from the last that is not inside to the first that is outside */
    size_t middle = low + (outside - low) / 2;
    if (ask(&t, n, middle) == OUTSIDE) {
      outside = middle;
    } else {
      low = middle + 1;
    }
  }
  if (inside) {
    b.high = (struct prefix){t.value[inside - 1], 0};
  }
  if (outside < t.count) {
    b.low = (struct prefix){t.value[outside], 0};
  }
  if (inside > 1 && t.value[inside - 2] == b.high.value) { /* many are equal: does it end among them? */
    const struct prefix ties = {b.high.value, n->row->n};
    if (is_longer(b.low, ties) && by_rough_mass(n, rough_mass(n->row, ties, n->inverse)) == OUTSIDE) {
      b.low = ties;
    }
  }
  return b;
}

/* What is in low and not in high, in id order. */
static struct list gather(const struct judged *j, struct bracket b, char **scratch) {
  struct list list = list_in(scratch, j->n);
  for (size_t block = 0; block < j->blocks; block++) {
    if (has_part(j, block, b.low)) {
      float room[BLOCK];
      const float *z = block_of(j, block, room);
      for (size_t i = 0; i < BLOCK; i += LANES) {
        vf v = v_load(z + i);
        vm in = m_and(lanes_in(v, block * BLOCK + i, b.low), v_ge(v_set1(b.high.value), v));
        append(&list, v, ids_from(block * BLOCK + i), in);
      }
    }
  }
  return list;
}

/* Exact masses of n's total and, into *above, of what is above a value, in one pass. */
static uint64_t exact_masses(const struct nucleus *n, float value, uint64_t *above) {
  const struct judged *j = n->row;
  vw upper = w_zero(), lower = w_zero();
  for (size_t b = 0; b < j->blocks; b++) {
    if (!has_part(j, b, n->of)) {
      continue;
    }
    float room[BLOCK];
    const float *z = block_of(j, b, room);
    vf e[4];
    terms_in(e, z, b * BLOCK, n->of, j->max, n->inverse, 0);
    int mixed = j->maxima[b] > value;
    for (size_t i = 0; i < 4; i++) {
      vm is_above = v_gt(v_load(z + LANES * i), v_set1(value));
      lower = w_add(lower, mixed ? v_select(is_above, v_set1(0), e[i]) : e[i]);
      upper = mixed ? w_add(upper, v_keep(is_above, e[i])) : upper;
    }
  }
  *above = w_total(upper);
  return *above + w_total(lower);
}

/* The prefix of a gathered list at which its weights reach `limit`, at least 1. */
static struct prefix reach(const struct list *list, uint64_t limit, const struct weighing *how, char *scratch) {
  struct prefix p = select_weight(list->value, list->count, limit, how, scratch);
  p.end = list->id[p.end - 1] + 1;
  return p;
}

/* Where the nucleus ends, if the rough total leaves only one place; needs the list to begin at the row's first. */
static int ends_surely(const struct nucleus *n, const struct list *list, const struct weighing *how, struct prefix *end,
                       char *scratch) {
  if (n->rough < 0.0) {
    return 0;
  }
  double weight = n->rough * 0x1p43;
  uint64_t least = top_p_limit(n->top_p, (uint64_t)(weight * (1.0 - ROUGH_SHARE - SUM_SHARE)));
  uint64_t most = top_p_limit(n->top_p, (uint64_t)(weight * (1.0 + ROUGH_SHARE + SUM_SHARE)));
  struct prefix last = reach(list, most, how, scratch);
  *end = reach(list, least, how, scratch);
  return end->value == last.value && end->end == last.end;
}

/* The nucleus as a prefix; what comes of min_keep and ties="all" is the caller's. */
static struct prefix nucleus_prefix(struct nucleus *n, char *scratch) {
  const struct weighing how = {1, n->row->max, n->inverse};
  const struct bracket b = narrow(n);
  const struct list list = gather(n->row, b, &scratch);
  uint64_t above = 0;
  struct prefix end;
  if (b.high.value == INFINITY && ends_surely(n, &list, &how, &end, scratch)) {
    return end;
  }
  n->exact = exact_masses(n, b.high.value, &above);
  return reach(&list, top_p_limit(n->top_p, n->exact) - above, &how, scratch);
}

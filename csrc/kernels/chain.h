/* chain: a token a row by a program, a list of steps that is data (docs/samplers.md).

   There are two ways through the steps. The exact one writes the row out and sorts it: every step then works on the
   whole list of candidates (candidates.h). The other looks at the row as it lies, through its blocks' maxima
   (judged.h): most steps keep a prefix of z's order, so a bound says all; what a step takes out above the rest becomes
   an edit; and as soon as a step leaves few, they are picked and go on as a list. */

struct course {
  const struct chain_args *a;
  const struct philox_key *key;
  size_t n;
  struct judged j; /* until there is a list: what is left is `kept` of it */
  struct prefix kept;
  double temperature;
  struct edits edits;     /* j's, which can be added to */
  float *own;             /* the values of all ids, once a step has given them others */
  struct nucleus nucleus; /* a top-p that is not known yet, if its top_p is below 1: draws can do without */
  int listed;
  struct candidates c;
  uint64_t coins;
  char *scratch; /* what is free */
};

/* ---- edits ---- */

/* What is added behind the penalties, to these ids in this order. */
struct added {
  const int64_t *id;
  const float *value;
  size_t count;
};

static struct added added_to(const struct chain_args *a, int64_t row) {
  struct ids ids = ids_of(&a->added_ids, &a->added_offsets, row);
  const float *values = a->added_values.ptr;
  return (struct added){ids.id, ids.count ? values + (ids.id - (const int64_t *)a->added_ids.ptr) : NULL, ids.count};
}

static void add_edits(struct edits *e, const struct judged *j, struct added added) {
  for (size_t i = 0; i < added.count; i++) {
    size_t known = e->count, s = slot_of(e, (size_t)added.id[i]);
    if (s == known) {
      e->before[s] = e->value[s] = logit(j, e->id[s]);
    }
    e->value[s] += added.value[i];
  }
}

static int judge_course(struct course *w, const struct sample_args *edits, int64_t row) {
  const struct chain_args *a = w->a;
  int has_nan = 0;
  begin_judging(&w->j, edits, row, &has_nan, &w->scratch);
  if (a->bias_ids.ptr || a->prompt_ids.ptr || a->output_ids.ptr || a->added_ids.ptr) {
    w->edits = usual_edits(&w->j, edits, row, &w->scratch);
    add_edits(&w->edits, &w->j, added_to(a, row));
    put_edits(&w->j, w->edits, &has_nan);
  }
  return end_judging(&w->j, has_nan);
}

/* These ids are no longer there. */
SELDOM void take_out(struct course *w, const uint32_t *id, size_t count) {
  struct judged *j = &w->j;
  struct edits *e = &w->edits;
  if (!e->is_edited) {
    *e = edits_in(j, &w->scratch);
  } else if (!j->is_edited) { /* those there were are part of other values */
    memset(e->is_edited, 0, j->blocks * sizeof *e->is_edited);
    e->count = 0;
  }
  for (size_t i = 0; i < count; i++) {
    float before = judged_logit(j, id[i]);
    size_t s = slot_of(e, id[i]);
    e->before[s] = before;
    e->value[s] = -INFINITY;
  }
  j->is_edited = e->is_edited;
  j->slot = e->slot;
  j->edited = e->value;
  for (size_t i = 0; i < count; i++) {
    float *max = &j->maxima[id[i] / BLOCK];
    *max = e->before[e->slot[id[i]]] >= *max ? max_of_block(j, id[i] / BLOCK) : *max;
  }
  int has_nan = 0;
  j->max = block_max(j->maxima, 0, j->blocks, DTYPE_F32, &has_nan);
}

/* ---- what is left of a row, as it lies ---- */

INLINE float inverse_now(const struct course *w) { return (float)(1.0 / w->temperature); }

static void shorten(struct course *w, struct prefix p, double min_keep) {
  if (min_keep > 1.0 || p.value > w->j.max) {
    size_t least = min_keep > 1.0 ? (min_keep < (double)w->n ? (size_t)min_keep : w->n) : 1;
    p = longer(p, first_prefix(&w->j, least, w->scratch));
  }
  w->kept = shorter(w->kept, p);
}

static void start_list(struct course *w, struct list list, int is_prefix) {
  w->c = (struct candidates){.list = list, .temperature = w->temperature, .max = list.value[0], .is_prefix = is_prefix};
  w->c.weight = (uint64_t *)take(&w->scratch, (list.count + LANES) * sizeof *w->c.weight);
  w->listed = 1;
  w->nucleus.top_p = 1.0; /* one that is not known is settled before, unless none but the first is kept */
}

/* The k first of what is left. */
static struct list pick_first(const struct course *w, size_t k, char **scratch) {
  struct list first = first_of(&w->j, k, scratch);
  while (first.count > 1 && (first.value[first.count - 1] == -INFINITY ||
                             !is_in(w->kept, first.value[first.count - 1], first.id[first.count - 1]))) {
    first.count--;
  }
  return first;
}

static void list_first(struct course *w, size_t k) { start_list(w, pick_first(w, k, &w->scratch), 1); }

SELDOM void list_all(struct course *w) {
  struct list all = gather(&w->j, w->kept, &w->scratch), spare = list_in(&w->scratch, all.count);
  sort_list(&all, &spare);
  start_list(w, all, 1);
}

/* Sums over what is left: of weights, and of -y by weight. Either exact, or within CLOSE of it. */
#define CLOSE 2e-6 /* float32 sums of 22 terms, weights rounded to 2^-44 */
struct sums {
  uint64_t least, most; /* that the weight can be */
  double mean, off;     /* of -y; by how much it can be wrong */
};

/* The four vectors of block b, of what is left: -inf beside it. */
INLINE void left_of_block(vf v[4], const struct course *w, const struct cut *cut, size_t b) {
  float room[BLOCK];
  const float *z = block_of(&w->j, b, room);
  int all = w->kept.value == -INFINITY;
  for (size_t i = 0; i < 4; i++) {
    v[i] = v_load(z + LANES * i);
    v[i] = all ? v[i] : v_select(is_kept(cut, b * BLOCK + LANES * i, v[i]), v[i], v_set1(-INFINITY));
  }
}

WHOLE_ROW struct sums exact_sums(const struct course *w) {
  const struct judged *j = &w->j;
  const struct cut cut = cut_of(w->kept);
  const vf max = v_set1(j->max), inverse = v_set1(inverse_now(w));
  struct tally mass = no_tally(), sum = no_tally();
  for (size_t b = 0; b < j->blocks;) {
    uint32_t adds = 0;
    for (size_t end = min_size(b + TALLY / 4, j->blocks); b < end; b++) {
      if (has_part(j, b, w->kept)) {
        vf v[4];
        left_of_block(v, w, &cut, b);
        for (size_t i = 0; i < 4; i++) {
          vf e, terms = terms_of_mean(&e, v[i], max, inverse);
          tally(&mass, e);
          tally(&sum, terms);
        }
        adds += 4;
      }
    }
    settle_tally(&mass, adds);
    settle_tally(&sum, adds);
  }
  uint64_t total = tally_total(&mass);
  return (struct sums){total, total, (double)tally_total(&sum) / (double)total, 0.0};
}

INLINE struct sums close_sums_as(const struct course *w, int with_mean) {
  const struct judged *j = &w->j;
  const struct cut cut = cut_of(w->kept);
  const vf max = v_set1(j->max), inverse = v_set1(inverse_now(w)), zero = v_set1(0.0f), most = v_set1(88.0f);
  double mass = 0.0, sum = 0.0;
  for (size_t b = 0; b < j->blocks;) {
    vf e4[4] = {zero, zero, zero, zero}, y4[4] = {zero, zero, zero, zero};
    for (size_t end = min_size(b + LANES, j->blocks); b < end; b++) {
      if (has_part(j, b, w->kept)) {
        vf v[4];
        left_of_block(v, w, &cut, b);
        for (size_t i = 0; i < 4; i++) {
          vf y = v_mul(v_sub(v[i], max), inverse), e = v_exp(y);
          e4[i] = v_add(e4[i], e);
          y4[i] = with_mean ? v_fma(e, v_min(v_sub(zero, y), most), y4[i]) : zero;
        }
      }
    }
    mass += (double)sum_across64(e4);
    sum += with_mean ? (double)sum_across64(y4) : 0.0;
  }
  double mean = sum / mass;
  return (struct sums){(uint64_t)(mass * (1.0 - CLOSE) * 0x1p43), (uint64_t)(mass * (1.0 + CLOSE) * 0x1p43) + 1, mean,
                       (3.0 * mean + 1.0) * CLOSE};
}
WHOLE_ROW struct sums close_mass(const struct course *w) { return close_sums_as(w, 0); }
WHOLE_ROW struct sums close_sums(const struct course *w) { return close_sums_as(w, 1); }

/* ---- bounds ---- */

/* What a logit must do: weigh `limit`, or lie above what is `radius` below the mean, or as much above it. */
struct edge {
  float max, inverse;
  uint64_t limit;      /* 0: the other two */
  double mean, radius; /* of -y */
  int side;            /* -1: y is nearer to the mean than the radius, or above; 1: above it by the radius at least */
};

static int reaches(const struct edge *e, float z) {
  if (e->limit) {
    uint64_t weight[LANES];
    const struct weighing how = {1, e->max, e->inverse, 0.0};
    weigh16(weight, v_set1(z), &how);
    return weight[0] >= e->limit;
  }
  double above = (double)((z - e->max) * e->inverse) + e->mean;
  return e->side < 0 ? above > 0.0 || -above < e->radius : above > 0.0 && above >= e->radius;
}

/* The least that does; infinite if the largest does not. */
static float edge_value(const struct edge *e) {
  uint32_t low = order_key(-FLT_MAX), high = order_key(e->max);
  if (!reaches(e, e->max)) {
    return INFINITY;
  }
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (reaches(e, key_value(middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return key_value(high);
}

static float bound_of_weight(const struct course *w, uint64_t limit) {
  const struct edge e = {.max = w->j.max, .inverse = inverse_now(w), .limit = limit};
  return edge_value(&e);
}

WHOLE_ROW int any_between(const struct judged *j, float least, float below) {
  const vf low = v_set1(least), high = v_set1(below);
  unsigned found = 0;
  for (size_t b = 0; b < j->blocks && !found; b++) {
    if (j->maxima[b] >= least) {
      float room[BLOCK];
      const float *z = block_of(j, b, room);
      for (size_t i = 0; i < BLOCK; i += LANES) {
        vf v = v_load(z + i);
        found |= m_bits(m_and(v_ge(v, low), v_gt(high, v)));
      }
    }
  }
  return found != 0;
}

/* What weighs a share of all that is left reaches this; of_top: a share of the share of the largest (top-a). Mostly it
   is enough to know the weight of all closely. */
SELDOM float bound_of_share(const struct course *w, double share, int of_top) {
  struct sums sums = close_mass(w);
  for (int exact = 0;; exact++) {
    uint64_t least = of_top ? top_a_limit(share, sums.most) : share_limit(share, sums.least);
    uint64_t most = of_top ? top_a_limit(share, sums.least) : share_limit(share, sums.most);
    float low = bound_of_weight(w, least), high = least == most ? low : bound_of_weight(w, most);
    if (exact || low == high || !any_between(&w->j, low, high)) {
      return high;
    }
    sums.least = sums.most = exact_mass(&w->j, w->kept, inverse_now(w));
  }
}

static void shorten_to_share(struct course *w, double share, int of_top, double min_keep) {
  shorten(w, (struct prefix){bound_of_share(w, share, of_top), w->n}, min_keep);
}

/* ---- steps ---- */

static void cool_row(struct course *w, double by) {
  if (!multiply_temperature(&w->temperature, by)) {
    w->temperature = 1.0;
    list_first(w, 1);
  }
}

SELDOM void cool_row_by_entropy(struct course *w, const double number[3]) {
  if (!(number[1] > 0.0)) {
    cool_row(w, number[0]);
    return;
  }
  size_t count = count_in(&w->j, w->kept);
  if (count > 1) {
    const struct sums sums = exact_sums(w);
    cool_row(w, dynamic_temperature(number, log_weight(sums.least) + sums.mean, count));
  }
}

static void first_of_row(struct course *w, double k, int ties_all) {
  if (!(k > 0.0) || k >= (double)w->n) {
    return;
  }
  if (ties_all) {
    struct prefix first = first_prefix(&w->j, (size_t)k, w->scratch);
    first.end = w->n;
    w->kept = shorter(w->kept, first);
  } else {
    list_first(w, (size_t)k);
  }
}

static void top_p_of_row(struct course *w, const double number[3]) {
  if (number[0] < 1.0) {
    w->nucleus = whole_nucleus(&w->j, inverse_now(w), number[0]);
    w->nucleus.of = w->kept;
    w->nucleus.min_keep = number[1] < (double)w->n ? (size_t)number[1] : w->n;
    w->nucleus.ties_all = number[2] != 0.0;
  }
}

SELDOM void settle_nucleus(struct course *w) {
  if (w->nucleus.top_p < 1.0) {
    struct prefix p = nucleus_of_left(&w->nucleus, w->scratch).prefix;
    p.end = w->nucleus.ties_all ? w->n : p.end;
    w->nucleus.top_p = 1.0;
    shorten(w, p, (double)w->nucleus.min_keep);
  }
}

WHOLE_ROW void bend_row(struct course *w, const struct change *how) {
  struct judged *j = &w->j;
  const struct cut cut = cut_of(w->kept);
  if (!w->own) {
    w->own = (float *)take(&w->scratch, j->blocks * BLOCK * sizeof *w->own);
  }
  for (size_t b = 0; b < j->blocks; b++) {
    float room[BLOCK];
    const float *z = block_of(j, b, room);
    for (size_t i = 0; i < BLOCK; i += LANES) {
      vf v = v_load(z + i), other = v_add(changed(v, how), v_set1(0.0f));
      v_store(w->own + b * BLOCK + i, v_select(is_kept(&cut, b * BLOCK + i, v), other, v_set1(-INFINITY)));
    }
  }
  int has_nan = 0;
  *j = plain_row(w->own, w->n, DTYPE_F32, j->maxima);
  find_maxima(j, &has_nan);
  end_judging(j, has_nan);
  w->kept = everything;
  w->temperature = 1.0;
}

/* A block's, lane by lane, so that compilers see vectors in it. */
WHOLE_ROW void add_spread(struct spread *s, const float z[BLOCK], float max) {
  for (size_t l = 0; l < LANES; l++) {
    double sum = s->sum[l], square = s->square[l];
    for (size_t i = 0; i < BLOCK; i += LANES) {
      double d = (double)z[i + l] - (double)max;
      sum += d;
      square += d * d;
    }
    s->sum[l] = sum;
    s->square[l] = square;
  }
}

WHOLE_ROW void near_row(struct course *w, const double number[3]) {
  const struct judged *j = &w->j;
  const struct cut cut = cut_of(w->kept);
  const vf one = v_set1(1.0f);
  struct spread s;
  vf count = v_set1(0);
  memset(&s, 0, sizeof s);
  if (!(number[0] > 0.0)) {
    return;
  }
  for (size_t b = 0; b < j->blocks; b++) {
    if (has_part(j, b, w->kept)) {
      float room[BLOCK], left[BLOCK];
      const float *z = block_of(j, b, room);
      for (size_t i = 0; i < BLOCK; i += LANES) {
        vf v = v_load(z + i);
        vm in = is_kept(&cut, b * BLOCK + i, v);
        count = v_add(count, v_keep(in, one));
        v_store(left + i, v_select(in, v, v_set1(j->max)));
      }
      add_spread(&s, left, j->max);
    }
  }
  float left = v_sum_across(count); /* exact up to 2^24 */
  if (left > 1.0f) {
    shorten(w, (struct prefix){sigma_bound(&s, (double)left, j->max, number), w->n}, 0.0);
  }
}

SELDOM void exclude_from_row(struct course *w, const double number[3]) {
  struct prefix above = {bound_of_share(w, number[1], 0), w->n};
  above = shorter(w->kept, above);
  char *rest = w->scratch;
  struct list list = gather(&w->j, above, &rest);
  if (list.count < 2 || (number[2] > 1.0 && (double)(count_in(&w->j, w->kept) - (list.count - 1)) < number[2])) {
    return;
  }
  struct list spare = list_in(&rest, list.count);
  sort_list(&list, &spare);
  w->scratch = w->edits.is_edited ? w->scratch : rest; /* edits must not be put where the list lies */
  take_out(w, list.id, list.count - 1);
}

/* ---- typical, as the row lies ---- */

/* Whoever is left to decide on, in id order; the rest of what is nearer weighs `within`. */
struct ring {
  struct list left;
  uint64_t within;
};

/* |y - mean| in float32, `slack` off at most. */
INLINE vf rough_distance(vf z, const struct edge *e) {
  vf off = v_add(v_mul(v_sub(z, v_set1(e->max)), v_set1(e->inverse)), v_set1((float)e->mean));
  return v_max(off, v_sub(v_set1(0.0f), off));
}

static uint64_t mass_within(const struct ring *r, const struct edge *e, float radius) {
  const struct measure how = {e->max, e->inverse};
  vw mass = w_zero();
  for (size_t i = 0; i < r->left.count; i += LANES) {
    vf z = v_load_n(r->left.value + i, min_size(LANES, r->left.count - i), -INFINITY);
    mass = w_add(mass, v_keep(v_ge(v_set1(radius), rough_distance(z, e)), term_of(z, how, 1)));
  }
  return w_total(mass);
}

static void keep_ring(struct ring *r, const struct edge *e, float from, float to) {
  const struct list old = r->left;
  r->left.count = 0;
  for (size_t i = 0; i < old.count; i += LANES) {
    vf z = v_load_n(old.value + i, min_size(LANES, old.count - i), NAN), d = rough_distance(z, e);
    append(&r->left, z, u_load(old.id + i), m_and(v_gt(d, v_set1(from)), v_ge(v_set1(to), d)));
  }
}

/* Narrows to where the limit is reached, as far as that can be told: what is surely nearer goes into `within`, what is
   surely farther out. Both must hold for a limit in least .. most and a mean that is `off`. */
static void narrow_ring(struct ring *r, const struct edge *e, uint64_t least, uint64_t most, double off, float radius) {
  float slack = (fabsf((float)e->mean) + 2.0f * radius + 1.0f) * 0x1p-22f + 2.0f * (float)off;
  float low = -slack, high = radius;
  keep_ring(r, e, -1.0f, radius + 2.0f * slack);
  while (r->left.count > FEW && high - low > 16.0f * slack) {
    float middle = low + (high - low) * 0.5f;
    uint64_t mass = r->within + mass_within(r, e, middle);
    if (mass >= most) {
      high = middle;
      keep_ring(r, e, -1.0f, middle + 2.0f * slack);
    } else if (mass < least) {
      low = middle;
      r->within += mass_within(r, e, middle - 2.0f * slack);
      keep_ring(r, e, middle - 2.0f * slack, INFINITY);
    } else {
      return;
    }
  }
}

/* Takes out what is too likely; what is too unlikely is no longer in the prefix. */
SELDOM void keep_up_to(struct course *w, struct edge e, float z, uint32_t id) {
  double last = (double)((z - e.max) * e.inverse) + e.mean;
  char *rest = w->scratch;
  e.radius = last > 0.0 ? last : -last;
  e.side = 1;
  const struct prefix far = {edge_value(&e), w->n};
  struct list above = gather(&w->j, shorter(w->kept, far), &rest);
  size_t out = 0;
  for (size_t i = 0; i < above.count; i++) {
    double y = (double)((above.value[i] - e.max) * e.inverse) + e.mean;
    int first = above.value[i] > z || (above.value[i] == z && above.id[i] <= id);
    if (y > e.radius || (last > 0.0 && !first)) {
      above.id[out++] = above.id[i];
    }
  }
  e.side = -1;
  const struct prefix near = {last > 0.0 ? edge_value(&e) : z, last > 0.0 ? w->n : id + 1};
  w->kept = shorter(w->kept, near);
  if (out) {
    w->scratch = w->edits.is_edited ? w->scratch : rest;
    take_out(w, above.id, out);
  }
}

/* Whether the order of c's candidates, and with it who is the last, is the same for all means that it can be. */
SELDOM int is_last_for_sure(const struct candidates *c, double mean, double off, size_t last) {
  double y = (double)y_of(c, last), distance = fabs(y + mean);
  int sure = 1;
  for (size_t i = 0; i < c->list.count; i++) {
    double other = (double)y_of(c, i);
    sure &= other == y || fabs(fabs(other + mean) - distance) > 4.0 * off;
  }
  return sure;
}

/* 0 if sums that are only close do not tell. */
static int keep_typical(struct course *w, double p, struct sums sums) {
  struct edge e = {.max = w->j.max, .inverse = inverse_now(w), .side = -1, .mean = sums.mean};
  uint64_t least = top_p_limit(p, sums.least), most = top_p_limit(p, sums.most);
  for (float radius = 2.0f; radius < 1000.0f; radius *= 1.5f) {
    char *rest = w->scratch;
    e.radius = (double)radius + 0x1p-8;
    const struct prefix near = {edge_value(&e), w->n};
    struct ring r = {gather(&w->j, shorter(w->kept, near), &rest), 0};
    if (mass_within(&r, &e, radius) < most) { /* at 88 all that weighs anything is within */
      continue;
    }
    narrow_ring(&r, &e, least, most, sums.off, radius);
    struct list spare = list_in(&rest, r.left.count);
    sort_list(&r.left, &spare);
    struct candidates c = {.list = r.left, .temperature = w->temperature, .max = e.max};
    c.weight = (uint64_t *)take(&rest, (c.list.count + LANES) * sizeof *c.weight);
    weigh(&c);
    size_t last = nearest_of(&c, e.mean, least - r.within, 0.0).last;
    if (sums.off > 0.0 &&
        (nearest_of(&c, e.mean, most - r.within, 0.0).last != last || !is_last_for_sure(&c, e.mean, sums.off, last))) {
      return 0;
    }
    keep_up_to(w, e, c.list.value[last], c.list.id[last]);
    return 1;
  }
  return 0;
}

static void typical_of_row(struct course *w, const double number[3]) {
  if (number[0] < 1.0 && !keep_typical(w, number[0], close_sums(w))) {
    keep_typical(w, number[0], exact_sums(w));
  }
}

/* ---- a row ---- */

/* What a draw changes in a sequence's state. */
struct lesson {
  double step, number[3], log_total;
  struct change change;
  struct judged before; /* adaptive-p: of other values, before they became these */
  struct list list;
};

static uint64_t weigh_left(struct course *w) {
  if (w->listed) {
    weigh(&w->c);
    return w->c.total;
  }
  return exact_mass(&w->j, w->kept, inverse_now(w));
}

SELDOM void truncate_by_mirostat(struct course *w, const double number[3], double mu) {
  if (w->listed) {
    keep_first(&w->c, mirostat_count(&w->c, mu, number[2], w->n), 0.0);
    return;
  }
  char *rest = w->scratch;
  size_t m = number[2] < (double)w->n ? (size_t)number[2] : w->n;
  struct candidates first = {.list = pick_first(w, m, &rest), .temperature = w->temperature, .max = w->j.max};
  first_of_row(w, (double)mirostat_count(&first, mu, number[2], w->n), 0);
}

SELDOM void adapt(struct course *w, struct lesson *l, const double state[2]) {
  uint64_t total = weigh_left(w);
  if (w->listed) {
    struct list list = list_in(&w->scratch, w->c.list.count);
    list.count = w->c.list.count;
    memcpy(list.value, w->c.list.value, list.count * sizeof *list.value);
    memcpy(list.id, w->c.list.id, list.count * sizeof *list.id);
    l->list = list;
    l->change = adaptive_change(l->number, state, total, w->c.max, inverse_of(&w->c));
    change_candidates(&w->c, &l->change, w->n, w->scratch);
  } else {
    l->before = w->j;
    l->change = adaptive_change(l->number, state, total, w->j.max, inverse_now(w));
    w->own = NULL;
    bend_row(w, &l->change);
  }
}

/* Steps that learn from the draw are the last. */
SELDOM void learn_from(struct course *w, struct lesson *l, const struct chain_step *s, const double state[2]) {
  l->step = s->step;
  memcpy(l->number, s->number, sizeof l->number);
  if (s->step == CHAIN_ADAPTIVE_P) {
    if (s->number[0] >= 0.0) {
      adapt(w, l, state);
    } else {
      l->step = 0.0;
    }
    return;
  }
  if (s->step == CHAIN_MIROSTAT) {
    truncate_by_mirostat(w, s->number, state[0]);
  } else if (w->listed) {
    keep_share(&w->c, mirostat_share(state[0]), 1.0);
  } else {
    shorten_to_share(w, mirostat_share(state[0]), 0, 1.0);
  }
  l->log_total = log_weight(weigh_left(w));
}

SELDOM void update_state(const struct course *w, const struct lesson *l, size_t token, float z, double state[2]) {
  if (l->step == CHAIN_MIROSTAT || l->step == CHAIN_MIROSTAT_V2) {
    float y = w->listed ? (z - w->c.max) * inverse_of(&w->c) : (z - w->j.max) * inverse_now(w);
    double surprise = (l->log_total - (double)(y < -FLT_MAX ? -FLT_MAX : y)) / LN2;
    state[0] -= l->number[1] * (surprise - l->number[0]);
  } else if (l->step == CHAIN_ADAPTIVE_P) {
    size_t i = 0;
    while (w->listed && i + 1 < l->list.count && l->list.id[i] != token) {
      i++;
    }
    float before = w->listed ? l->list.value[i] : judged_logit(&l->before, token), e[LANES];
    v_store(e, v_exp(v_set1((before - l->change.max) * l->change.inverse)));
    double decay = l->number[1] < 0.99 ? l->number[1] : 0.99;
    state[0] = (double)(e[0] * l->change.share) + decay * state[0];
    state[1] = 1.0 + decay * state[1];
  }
}

SELDOM void keep_eta(struct course *w, const double number[3]) {
  if (w->listed) {
    double mean = mean_of(&w->c);
    keep_share(&w->c, eta_share(number[0], log_weight(w->c.total) + mean), number[1]);
  } else {
    const struct sums sums = exact_sums(w);
    double share = eta_share(number[0], log_weight(sums.least) + sums.mean);
    shorten(w, (struct prefix){bound_of_weight(w, share_limit(share, sums.least)), w->n}, number[1]);
  }
}

static void take_step(struct course *w, const struct chain_step *s) {
  struct candidates *c = w->listed ? &w->c : NULL;
  const double *number = s->number;
  switch ((int)s->step) {
  case CHAIN_TEMPERATURE:
    c ? cool(c, number[0]) : cool_row(w, number[0]);
    break;
  case CHAIN_DYNAMIC_TEMPERATURE:
    c ? cool_by_entropy(c, number) : cool_row_by_entropy(w, number);
    break;
  case CHAIN_QUADRATIC:
    if (number[0] > 0.0) {
      const struct change how =
          c ? quadratic_change(number, c->max, inverse_of(c)) : quadratic_change(number, w->j.max, inverse_now(w));
      c ? change_candidates(c, &how, w->n, w->scratch) : bend_row(w, &how);
    }
    break;
  case CHAIN_TOP_K:
    c ? first_of_candidates(c, number[0], number[1] != 0.0) : first_of_row(w, number[0], number[1] != 0.0);
    break;
  case CHAIN_TOP_P:
    c ? top_p_of_candidates(c, number) : top_p_of_row(w, number);
    break;
  case CHAIN_MIN_P:
    if (number[0] > 0.0) {
      float bound = min_p_bound(number[0], c ? c->max : w->j.max, c ? c->temperature : w->temperature);
      c ? keep_reaching(c, bound, number[1]) : shorten(w, (struct prefix){bound, w->n}, number[1]);
    }
    break;
  case CHAIN_TYPICAL:
    if (!c && number[1] > 1.0) {
      list_all(w);
      c = &w->c;
    }
    c ? typical_candidates(c, number[0], number[1]) : typical_of_row(w, number);
    break;
  case CHAIN_EPSILON:
    if (number[0] > 0.0) {
      c ? keep_share(c, number[0], number[1]) : shorten_to_share(w, number[0], 0, number[1]);
    }
    break;
  case CHAIN_ETA:
    if (number[0] > 0.0) {
      keep_eta(w, number);
    }
    break;
  case CHAIN_TOP_H:
    if (!c) {
      list_first(w, min_size(TOP_H, w->n));
    }
    top_h_of_candidates(&w->c, number[0]);
    break;
  case CHAIN_TOP_A:
    if (number[0] > 0.0) {
      c ? keep_top_a(c, number[0]) : shorten_to_share(w, number[0], 1, 0.0);
    }
    break;
  case CHAIN_TAIL_FREE:
    if (!c && number[0] < 1.0) {
      list_all(w);
    }
    if (w->listed) {
      tail_free_candidates(&w->c, number[0], number[1]);
    }
    break;
  case CHAIN_TOP_N_SIGMA:
    c ? near_candidates(c, number, w->n, w->scratch) : near_row(w, number);
    break;
  case CHAIN_XTC:
    if (xtc_acts(number, w->coins++, w->key)) {
      c ? exclude_candidates(c, number) : exclude_from_row(w, number);
    }
    break;
  default: /* the draw renormalises */
    break;
  }
}

/* The whole row as a list, sorted. 0 if nothing can be chosen from it. */
SELDOM int list_whole(struct course *w, const struct sample_args *edits, int64_t row) {
  int has_nan = 0;
  float *z = (float *)take(&w->scratch, (w->n + 2 * BLOCK) * sizeof *z);
  char *rest = w->scratch;
  struct sample_args unmasked = *edits;
  unmasked.mask_kind = MASK_NONE;
  write_edited(z, (uint32_t *)take(&rest, w->n * sizeof(uint32_t)), &unmasked, row);
  const struct added added = added_to(w->a, row);
  for (size_t i = 0; i < added.count; i++) {
    z[added.id[i]] += added.value[i];
  }
  if (edits->mask_kind != MASK_NONE) { /* last: -inf and an infinite sum would be a NaN where nothing is allowed */
    const struct mask mask = mask_of(edits, row);
    forbid(z, w->n, &mask);
  }
  float max = block_max(z, 0, w->n, DTYPE_F32, &has_nan);
  if (has_nan || max == -INFINITY || max == INFINITY) {
    return 0;
  }
  struct list all = list_in(&w->scratch, w->n), spare = list_in(&w->scratch, w->n);
  for (size_t i = 0; i < w->n; i += LANES) { /* z is padded with -inf */
    vf v = v_load(z + i);
    append(&all, v, ids_from(i), v_gt(v, v_set1(-INFINITY)));
  }
  sort_list(&all, &spare);
  start_list(w, all, 0);
  return 1;
}

static struct winner draw_listed(struct course *w) {
  const struct candidates *c = &w->c;
  const struct list *l = &c->list;
  if (!l->count) { /* the row changed meanwhile */
    return (struct winner){-INFINITY, 0.0, w->n, -INFINITY};
  }
  if (l->count <= FEW) {
    return l->count > 1 ? best_of_few(l->value, l->id, l->count, c->temperature, w->key)
                        : (struct winner){0.0, 0.0, l->id[0], l->value[0]};
  }
  if (c->is_prefix) {
    return gumbel_argmax(&w->j, last_of(l), c->temperature, w->key);
  }
  size_t blocks = (w->n + BLOCK - 1) / BLOCK;
  char *rest = w->scratch;
  float *z = (float *)take(&rest, blocks * BLOCK * sizeof *z);
  int has_nan = 0;
  fill(z, blocks * BLOCK, -INFINITY);
  for (size_t i = 0; i < l->count; i++) {
    z[l->id[i]] = l->value[i];
  }
  struct judged row = plain_row(z, w->n, DTYPE_F32, (float *)take(&rest, (blocks + LANES) * sizeof *z));
  find_maxima(&row, &has_nan);
  return gumbel_argmax(&row, everything, c->temperature, w->key);
}

/* With a top-p that is not known, of its winner it is asked whether that keeps it. */
static struct winner draw_unlisted(struct course *w) {
  struct winner won = gumbel_argmax(&w->j, w->kept, w->temperature, w->key);
  while (w->nucleus.top_p < 1.0 && won.id < w->n && !is_in_nucleus(&w->nucleus, won)) {
    w->kept = (struct prefix){won.z, won.id};
    won = gumbel_argmax(&w->j, w->kept, w->temperature, w->key);
  }
  return won;
}

SELDOM void put_what_is_left(struct course *w, const struct sample_args *to, int64_t row) {
  uint64_t total = weigh_left(w);
  char *rest = w->scratch;
  const struct list kept = w->listed ? in_id_order(&w->c.list, w->n, &rest) : gather(&w->j, w->kept, &rest);
  put_support(to, row, &kept, w->listed ? w->c.max : w->j.max, w->listed ? inverse_of(&w->c) : inverse_now(w), total);
}

static int64_t run_row(const struct chain_args *a, const struct sample_args *edits, int64_t row, char *scratch) {
  const struct chain_row *r = (const struct chain_row *)a->chain_rows.ptr + row;
  const struct philox_key key = key_of(&a->params, row);
  double *state = (double *)a->state.ptr + 2 * row;
  struct course w = {.a = a,
                     .key = &key,
                     .n = (size_t)a->cols,
                     .kept = everything,
                     .nucleus.top_p = 1.0,
                     .temperature = 1.0,
                     .scratch = scratch};
  struct lesson lesson = {.step = 0.0};
  if (!(a->force_exact ? list_whole(&w, edits, row) : judge_course(&w, edits, row))) {
    return -1;
  }
  const struct chain_step *s = (const struct chain_step *)a->steps.ptr + r->first_step;
  for (const struct chain_step *end = s + r->steps; s < end; s++) {
    if (s->step != CHAIN_TEMPERATURE && s->step != CHAIN_RENORMALISE && s->step != CHAIN_MIN_P) {
      settle_nucleus(&w);
    }
    if (s->step >= CHAIN_MIROSTAT) {
      learn_from(&w, &lesson, s, state);
    } else {
      take_step(&w, s);
    }
  }
  if (a->support_ids.ptr) {
    settle_nucleus(&w);
    put_what_is_left(&w, edits, row);
  }
  const struct winner won = w.listed ? draw_listed(&w) : draw_unlisted(&w);
  if (won.id >= w.n) { /* a row that changes meanwhile may leave nobody */
    return -1;
  }
  update_state(&w, &lesson, won.id, won.z, state);
  return (int64_t)won.id;
}

static void chain(const struct chain_args *a, void *scratch) {
  const struct sample_args edits = {EDITS_OF(a), .params = a->params, .support_ids = a->support_ids,
                                    .support_logprobs = a->support_logprobs, .support_counts = a->support_counts};
  FOR_ROWS (r, a) {
    if (a->support_counts.ptr) {
      ((int64_t *)a->support_counts.ptr)[r] = 0;
    }
    ((int64_t *)a->tokens.ptr)[r] = run_row(a, &edits, r, scratch);
  }
}

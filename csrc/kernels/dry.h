/* DRY: what would go on repeating the end of the history is lowered, the more the longer the repetition. (p-e-w's
   sampler; the cut-offs are llama.cpp's, as reference.py has them.)

   How long the history ends as it did k ids ago is the Z-function of the history read backwards: linear, since what is
   known of a stretch that repeats the end is known of all that lies in it. */

/* What is added to logits after their penalties, in this order. */
struct added {
  const int64_t *id;
  const float *value;
  size_t count;
};

/* Whether a breaker begins i ids before the end; how many ids it has then, else 0. */
static size_t breaker_at(const struct chain_args *a, const struct chain_row *r, struct ids h, size_t i) {
  const int64_t *ids = a->breaker_ids.ptr, *offsets = (const int64_t *)a->breaker_offsets.ptr + r->first_breaker;
  size_t longest = 0;
  for (int64_t b = 0; b < r->breakers; b++) {
    const int64_t *breaker = ids + offsets[b];
    size_t length = (size_t)(offsets[b + 1] - offsets[b]), same = 0;
    while (length <= i + 1 && same < length && breaker[same] == h.id[h.count - 1 - i + same]) {
      same++;
    }
    longest = same == length && length > longest ? length : longest;
  }
  return longest;
}

/* How many of the last ids lie behind the last breaker. Few ids are like the first of one: only these are looked at. */
static size_t behind_breakers(const struct chain_args *a, const struct chain_row *r, struct ids h) {
  const int64_t *ids = a->breaker_ids.ptr, *offsets = (const int64_t *)a->breaker_offsets.ptr + r->first_breaker;
  uint64_t alike = 0; /* a bit for what first ids leave when divided by 64 */
  for (int64_t b = 0; b < r->breakers; b++) {
    alike |= (uint64_t)1 << (ids[offsets[b]] & 63);
  }
  for (size_t i = 0; alike && i < h.count; i++) {
    size_t length = alike >> (h.id[h.count - 1 - i] & 63) & 1 ? breaker_at(a, r, h, i) : 0;
    if (length) {
      return i + 1 - length;
    }
  }
  return h.count;
}

static int is_breaker(const struct chain_args *a, const struct chain_row *r, int64_t id) {
  const int64_t *ids = a->breaker_ids.ptr, *offsets = (const int64_t *)a->breaker_offsets.ptr + r->first_breaker;
  int is = 0;
  for (int64_t b = 0; b < r->breakers; b++) {
    is |= offsets[b + 1] - offsets[b] == 1 && ids[offsets[b]] == id;
  }
  return is;
}

/* length[k], 0 < k < count: of how many ids the end is what it was k ids ago. */
static void find_lengths(int32_t *length, struct ids h) {
  const int64_t *last = h.id + h.count - 1;
  size_t n = h.count, from = 0, end = 0; /* last[-from .. -(end - 1)] repeats the end */
  for (size_t k = 1; k < n; k++) {
    size_t same = k < end ? min_size((size_t)length[k - from], end - k) : 0;
    if (k + same >= end) {
      while (k + same < n && last[-(ptrdiff_t)same] == last[-(ptrdiff_t)(k + same)]) {
        same++;
      }
      from = k;
      end = k + same;
    }
    length[k] = (int32_t)same;
  }
}

static double whole_power(double base, uint32_t exponent) {
  double power = 1.0;
  for (; exponent; exponent >>= 1, base *= base) {
    power = exponent & 1 ? power * base : power;
  }
  return power;
}

static float dry_penalty(const struct chain_row *r, uint32_t length) {
  double penalty = r->multiplier * whole_power(r->base, length - (uint32_t)r->allowed);
  penalty = penalty > -FLT_MAX ? penalty : -FLT_MAX;
  return (float)(penalty < FLT_MAX ? penalty : FLT_MAX);
}

/* Of each of e's ids, and of those that this adds, the longest repetition that it would go on with, and 1: 0 if none.
 */
static const uint32_t *longest_repetitions(const struct chain_args *a, int64_t row, struct edits *e, size_t n,
                                           char **scratch) {
  const struct chain_row *r = (const struct chain_row *)a->chain_rows.ptr + row;
  struct ids h = ids_of(&a->history_ids, &a->history_offsets, row);
  size_t window = r->last_n >= 0.0 && r->last_n < (double)h.count ? (size_t)r->last_n : h.count;
  size_t allowed = (size_t)r->allowed, limit;
  uint32_t *longest = (uint32_t *)take(scratch, n * sizeof *longest);
  memset(longest, 0, e->count * sizeof *longest);
  h.id += h.count - window;
  h.count = window;
  if (r->multiplier == 0.0 || window <= allowed || (limit = behind_breakers(a, r, h)) < allowed) {
    return longest;
  }
  int32_t *length = (int32_t *)a->lengths.ptr + (h.id - (const int64_t *)a->history_ids.ptr);
  find_lengths(length, h);
  for (size_t k = 1; k < window; k++) {
    size_t own = min_size((size_t)length[k], limit);
    if (own >= allowed) {
      size_t count = e->count, s = slot_of(e, (size_t)h.id[window - k]);
      longest[s] = s == count || own + 1 > longest[s] ? (uint32_t)own + 1 : longest[s];
    }
  }
  for (size_t i = 0; r->breakers && i < e->count; i++) {
    longest[i] = longest[i] && is_breaker(a, r, e->id[i]) ? 0 : longest[i];
  }
  return longest;
}

static struct added added_by_user(const struct chain_args *a, int64_t row) {
  struct ids ids = ids_of(&a->added_ids, &a->added_offsets, row);
  const float *values = a->added_values.ptr;
  return (struct added){ids.id, ids.count ? values + (ids.id - (const int64_t *)a->added_ids.ptr) : NULL, ids.count};
}

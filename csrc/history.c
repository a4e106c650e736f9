#include "history.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"

/* ---- a logit, as float32 ---- */

static float of_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static float widened(uint16_t h) {
  uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = h >> 10 & 31, fraction = h & 1023u;
  if (exponent == 31) {
    return of_bits(sign | 0x7f800000u | fraction << 13);
  }
  float magnitude = exponent ? of_bits((exponent + 112) << 23 | fraction << 13) : (float)fraction * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

static float logit_of(const struct edit_row *row, int64_t id) {
  uint16_t half;
  if (row->dtype == DTYPE_F32) {
    return ((const float *)row->x)[id] + 0.0f; /* both zeros are one */
  }
  memcpy(&half, (const uint16_t *)row->x + id, sizeof half);
  return (row->dtype == DTYPE_F16 ? widened(half) : of_bits((uint32_t)half << 16)) + 0.0f;
}

/* ---- the table ---- */

void touched_free(struct touched *t) {
  free(t->table);
  free(t->id);
  free(t->before);
  free(t->value);
  free(t->sum);
  free(t->times);
  free(t->z);
  memset(t, 0, sizeof *t);
}

static int grown(void **memory, int64_t count, size_t size) {
  void *more = realloc(*memory, (size_t)count * size);
  *memory = more ? more : *memory;
  return more != NULL;
}

static int reserve(struct touched *t, int64_t bound, int64_t window) {
  int64_t table = 64;
  while (table < 2 * bound) {
    table *= 2;
  }
  if (bound > t->room) {
    int64_t room = bound + bound / 2;
    if (!grown((void **)&t->id, room, sizeof *t->id) || !grown((void **)&t->before, room, sizeof *t->before) ||
        !grown((void **)&t->value, room, sizeof *t->value) || !grown((void **)&t->sum, room, sizeof *t->sum) ||
        !grown((void **)&t->times, room, sizeof *t->times)) {
      return 0;
    }
    t->room = room;
  }
  if (table > t->table_room) {
    if (!grown((void **)&t->table, table, sizeof *t->table)) {
      return 0;
    }
    t->table_room = table;
  }
  if (window > t->z_room) {
    if (!grown((void **)&t->z, window + window / 2, sizeof *t->z)) {
      return 0;
    }
    t->z_room = window + window / 2;
  }
  memset(t->table, 0, (size_t)table * sizeof *t->table);
  t->mask = (uint64_t)table - 1;
  t->count = 0;
  t->forced = 0;
  return 1;
}

static int64_t slot_of(struct touched *t, const struct edit_row *row, int64_t id) {
  uint64_t at = (uint64_t)id * 0x9e3779b97f4a7c15u >> 32 & t->mask;
  for (; t->table[at]; at = (at + 1) & t->mask) {
    if (t->id[t->table[at] - 1] == id) {
      return t->table[at] - 1;
    }
  }
  int64_t slot = t->count++;
  t->table[at] = (uint32_t)t->count;
  t->id[slot] = id;
  t->before[slot] = t->relative ? 0.0f : logit_of(row, id);
  t->value[slot] = t->forced ? -INFINITY : t->before[slot];
  t->sum[slot] = 0.0f;
  t->times[slot] = 0;
  return slot;
}

static float *value_of(struct touched *t, const struct edit_row *row, int64_t id) {
  return &t->value[slot_of(t, row, id)];
}

/* ---- parts of the text ---- */

struct part {
  const int64_t *id;
  int64_t count;
};

static struct part part_of(const struct edit_row *row, int64_t over) {
  if (over == OVER_PROMPT) {
    return (struct part){row->text, row->prompt};
  }
  int64_t from = over == OVER_OUTPUT ? row->prompt : 0;
  return (struct part){row->text + from, row->length - from};
}

static struct part last_of(struct part p, int64_t n) {
  return n >= 0 && n < p.count ? (struct part){p.id + p.count - n, n} : p;
}

/* What a step names, or else the prompt. */
static struct part source_of(const struct edit_step *s, const struct edit_row *row) {
  return s->ids ? (struct part){s->ids, s->count} : part_of(row, OVER_PROMPT);
}

static int ends_with(struct part text, const int64_t *ids, int64_t count) {
  return !count || (count <= text.count && !memcmp(text.id + text.count - count, ids, (size_t)count * sizeof *ids));
}

static double power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    result = exponent & 1 ? result * base : result;
  }
  return result;
}

/* ---- the steps ---- */

enum { REPEATED = 1u << 31 };

static void forbid(struct touched *t, const struct edit_row *row, const int64_t *ids, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    *value_of(t, row, ids[i]) = -INFINITY;
  }
}

/* What several sequences add to one logit is summed first. */
static void add_sequences(struct touched *t, const struct edit_step *s, const struct edit_row *row) {
  struct part text = part_of(row, s->over);
  for (int pass = 0; pass < 2; pass++) {
    for (int64_t i = 0; i < s->count; i++) {
      const int64_t *ids = s->ids + s->offsets[i];
      int64_t before = s->offsets[i + 1] - s->offsets[i] - 1;
      if (!ends_with(text, ids, before)) {
        continue;
      }
      int64_t slot = slot_of(t, row, ids[before]);
      if (pass == 0) {
        t->sum[slot] += (float)s->values[i];
        t->times[slot] = 1;
      } else if (t->times[slot]) {
        t->value[slot] = t->sum[slot] == -INFINITY ? -INFINITY : t->value[slot] + t->sum[slot];
        t->sum[slot] = 0.0f;
        t->times[slot] = 0;
      }
    }
  }
}

static float repeated(float v, float repetition) { return v > 0.0f ? v / repetition : v * repetition; }

static float counted(float v, uint32_t times, const struct edit_step *s) {
  float frequency = (float)s->numbers[1] * (float)times, presence = (float)s->numbers[2];
  if (s->flags & PENALTY_AWAY) {
    v = v >= 0.0f ? v - presence : v + presence;
    return v >= 0.0f ? v - frequency : v + frequency;
  }
  return s->flags & PENALTY_SUMMED ? v - (frequency + presence) : v - frequency - presence;
}

static void penalise(struct touched *t, const struct edit_step *s, const struct edit_row *row) {
  const float repetition = (float)s->numbers[0];
  struct part seen = last_of(part_of(row, s->over), s->last_n);
  struct part counts = last_of(part_of(row, s->counts_over), s->last_n);
  seen.count = repetition == 1.0f ? 0 : seen.count;
  counts.count = s->numbers[1] == 0.0 && s->numbers[2] == 0.0 ? 0 : counts.count;
  for (int64_t i = 0; i < seen.count; i++) {
    t->times[slot_of(t, row, seen.id[i])] |= REPEATED;
  }
  for (int64_t i = 0; i < counts.count; i++) {
    t->times[slot_of(t, row, counts.id[i])]++;
  }
  for (int64_t i = 0; i < t->count; i++) {
    uint32_t times = t->times[i] & ~REPEATED;
    float v = t->value[i];
    if (!t->times[i]) {
      continue;
    }
    if (s->flags & PENALTY_REPETITION_LAST && times) {
      v = counted(v, times, s);
    }
    if (t->times[i] & REPEATED) {
      v = repeated(v, repetition);
    }
    if (!(s->flags & PENALTY_REPETITION_LAST) && times) {
      v = counted(v, times, s);
    }
    t->value[i] = v;
    t->times[i] = 0;
  }
}

static void forget_times(struct touched *t) {
  if (t->count) {
    memset(t->times, 0, (size_t)t->count * sizeof *t->times);
  }
}

/* From the end backwards: full for last_n ids, then fading over n more; each id's repetition and presence as strong as
   at its last occurrence, its frequency at each. */
static void penalise_fading(struct touched *t, const struct edit_step *s, const struct edit_row *row) {
  struct part text = part_of(row, s->over);
  float repetition = (float)s->numbers[0], frequency = (float)s->numbers[1], presence = (float)s->numbers[2];
  const float fade = (float)s->n;
  const float less[3] = {(1.0f - repetition) / fade, -frequency / fade, -presence / fade};
  int64_t full = s->last_n < 0 ? 0 : text.count - s->last_n, end = full - s->n > 0 ? full - s->n : 0;
  for (int64_t i = text.count - 1; i >= end; i--) {
    int64_t slot = slot_of(t, row, text.id[i]);
    float v = t->value[slot];
    if (!t->times[slot]) {
      v = repeated(v, repetition) - presence;
      t->times[slot] = 1;
    }
    t->value[slot] = v - frequency;
    if (i < full) {
      repetition += less[0];
      frequency += less[1];
      presence += less[2];
    }
  }
  forget_times(t);
}

static void penalise_encoder(struct touched *t, const struct edit_step *s, const struct edit_row *row) {
  struct part source = source_of(s, row);
  for (int64_t i = 0; i < source.count; i++) {
    int64_t slot = slot_of(t, row, source.id[i]);
    if (!t->times[slot]) {
      t->value[slot] = repeated(t->value[slot], (float)s->numbers[0]);
      t->times[slot] = 1;
    }
  }
  forget_times(t);
}

/* Where in `source` the last n - 1 ids of `text` are, what follows them. */
static void forbid_ngrams(struct touched *t, const struct edit_row *row, struct part source, struct part text,
                          int64_t n) {
  int64_t prefix = n - 1;
  if (text.count < prefix) {
    return;
  }
  const int64_t *end = text.id + text.count - prefix;
  for (int64_t i = prefix; i < source.count; i++) {
    const int64_t *from = source.id + i - prefix;
    if (!prefix || (from[prefix - 1] == end[prefix - 1] && !memcmp(from, end, (size_t)prefix * sizeof *end))) {
      *value_of(t, row, source.id[i]) = -INFINITY;
    }
  }
}

/* ---- DRY ---- */

/* The id k places from the end. */
static int64_t from_end(struct part p, int64_t k) { return p.id[p.count - 1 - k]; }

/* How many ids from the end on are behind the last breaker that is whole. */
static int64_t behind_breakers(const struct edit_step *s, struct part text) {
  for (int64_t k = 0; s->count && k < text.count; k++) {
    int64_t longest = -1;
    for (int64_t b = 0; b < s->count; b++) {
      const int64_t *ids = s->ids + s->offsets[b];
      int64_t length = s->offsets[b + 1] - s->offsets[b];
      if (length - 1 > longest && length - 1 <= k &&
          !memcmp(text.id + text.count - 1 - k, ids, (size_t)length * sizeof *ids)) {
        longest = length - 1;
      }
    }
    if (longest >= 0) {
      return k - longest;
    }
  }
  return text.count;
}

static int breaks_alone(const struct edit_step *s, int64_t id) {
  for (int64_t b = 0; b < s->count; b++) {
    if (s->offsets[b + 1] - s->offsets[b] == 1 && s->ids[s->offsets[b]] == id) {
      return 1;
    }
  }
  return 0;
}

/* z[k]: how many ids, read backwards from k places before the end, are those at the end (Gusfield's Z, linear). */
static void match_backwards(int64_t *z, struct part text) {
  int64_t left = 0, right = 0; /* of the match that reaches furthest back */
  for (int64_t k = 1; k < text.count; k++) {
    int64_t n = k < right ? z[k - left] : 0;
    n = n < right - k ? n : right > k ? right - k : 0;
    while (n + k < text.count && from_end(text, n) == from_end(text, n + k)) {
      n++;
    }
    z[k] = n;
    if (k + n > right) {
      left = k;
      right = k + n;
    }
  }
}

static void lower_repeats(struct touched *t, const struct edit_step *s, const struct edit_row *row) {
  struct part text = last_of(part_of(row, s->over), s->last_n);
  int64_t allowed = s->n, most = behind_breakers(s, text);
  if (s->numbers[0] == 0.0 || text.count <= allowed || most < allowed) {
    return;
  }
  most = s->limit >= 0 && s->limit < most ? s->limit : most;
  match_backwards(t->z, text);
  for (int64_t k = 1; k < text.count; k++) {
    int64_t length = t->z[k] < most ? t->z[k] : most;
    if (length >= allowed) {
      uint32_t *longest = &t->times[slot_of(t, row, from_end(text, k - 1))];
      *longest = (uint32_t)length > *longest ? (uint32_t)length : *longest;
    }
  }
  for (int64_t i = 0; i < t->count; i++) {
    if (t->times[i] && !breaks_alone(s, t->id[i])) {
      double exponent = (double)((int64_t)t->times[i] - allowed);
      exponent = s->numbers[2] > 0.0 && exponent > s->numbers[2] ? s->numbers[2] : exponent;
      t->value[i] -= (float)(s->numbers[0] * power(s->numbers[1], (int64_t)exponent));
    }
    t->times[i] = 0;
  }
}

/* ---- lengths ---- */

static void raise_by_length(struct touched *t, const struct edit_step *s, const struct edit_row *row) {
  int64_t more = part_of(row, s->over).count - s->n;
  if (more <= 0) {
    return;
  }
  const float share = (float)(power(s->numbers[0], more) - 1.0);
  for (int64_t i = 0; i < s->count; i++) {
    float *v = value_of(t, row, s->ids[i]), by = fabsf(*v) * share;
    *v = isfinite(*v) ? *v + by : *v;
  }
}

static void force(struct touched *t, const struct edit_step *s, const struct edit_row *row) {
  int64_t length = part_of(row, s->over).count;
  for (int64_t i = 0; i < s->count; i++) {
    if ((int64_t)s->values[i] != length) {
      continue;
    }
    t->forced = 1;
    for (int64_t j = 0; j < t->count; j++) {
      t->value[j] = -INFINITY;
    }
    for (int64_t j = s->offsets[i]; j < s->offsets[i + 1]; j++) {
      *value_of(t, row, s->ids[j]) = 0.0f;
    }
  }
}

/* ---- all of them ---- */

int64_t edits_bound(const struct edit_step *steps, int64_t count, const struct edit_row *row, int64_t *window) {
  int64_t bound = 0;
  *window = 0;
  for (int64_t i = 0; i < count; i++) {
    const struct edit_step *s = &steps[i];
    int64_t whole = row->length;
    switch (s->kind) {
    case EDIT_PENALTIES:
      bound += 2 * (s->last_n >= 0 && s->last_n < whole ? s->last_n : whole);
      break;
    case EDIT_DRY:
      whole = s->last_n >= 0 && s->last_n < whole ? s->last_n : whole;
      *window = whole > *window ? whole : *window;
      bound += whole;
      break;
    case EDIT_FADING_PENALTIES:
    case EDIT_NGRAM:
      bound += whole;
      break;
    case EDIT_ENCODER_PENALTY:
    case EDIT_ENCODER_NGRAM:
      bound += source_of(s, row).count;
      break;
    case EDIT_FORCE:
      bound += s->offsets[s->count];
      break;
    default:
      bound += s->count;
    }
  }
  return bound < row->cols ? bound : row->cols;
}

static void edit_by_step(struct touched *t, const struct edit_step *s, const struct edit_row *row) {
  int64_t length = part_of(row, s->over).count;
  switch (s->kind) {
  case EDIT_ADD:
    for (int64_t i = 0; i < s->count; i++) {
      float *v = value_of(t, row, s->ids[i]), by = (float)s->values[i];
      *v = by == -INFINITY ? by : *v + by;
    }
    break;
  case EDIT_FORBID:
    forbid(t, row, s->ids, s->count);
    break;
  case EDIT_FORBID_TILL:
    forbid(t, row, s->ids, length < s->n ? s->count : 0);
    break;
  case EDIT_FORBID_AT:
    forbid(t, row, s->ids, length == s->n ? s->count : 0);
    break;
  case EDIT_SEQUENCES:
    add_sequences(t, s, row);
    break;
  case EDIT_PENALTIES:
    penalise(t, s, row);
    break;
  case EDIT_FADING_PENALTIES:
    penalise_fading(t, s, row);
    break;
  case EDIT_ENCODER_PENALTY:
    penalise_encoder(t, s, row);
    break;
  case EDIT_NGRAM:
    forbid_ngrams(t, row, part_of(row, s->over), part_of(row, s->over), s->n);
    break;
  case EDIT_ENCODER_NGRAM:
    forbid_ngrams(t, row, source_of(s, row), part_of(row, OVER_BOTH), s->n);
    break;
  case EDIT_DRY:
    lower_repeats(t, s, row);
    break;
  case EDIT_LENGTH_DECAY:
    raise_by_length(t, s, row);
    break;
  case EDIT_FORCE:
    force(t, s, row);
    break;
  }
}

int edit_by_text(struct touched *t, const struct edit_step *steps, int64_t count, const struct edit_row *row,
                 int relative) {
  int64_t window, bound = edits_bound(steps, count, row, &window);
  if (!reserve(t, bound, window)) {
    return -1;
  }
  t->relative = relative;
  for (int64_t i = 0; i < count; i++) {
    edit_by_step(t, &steps[i], row);
  }
  return 0;
}

/* ---- what comes of it ---- */

int64_t touched_lists(const struct touched *t, int64_t *ids, float *minus, float *plus) {
  int64_t n = 0;
  for (int64_t i = 0; i < t->count; i++) {
    float before = t->before[i], value = t->value[i];
    if (value == before || before == -INFINITY || (before != before && value != -INFINITY)) {
      continue;
    }
    ids[n] = t->id[i];
    if (minus) {
      minus[n] = value == -INFINITY ? 0.0f : -before;
    }
    plus[n++] = value;
  }
  return n;
}

void touched_write(const struct touched *t, float *z, int64_t cols) {
  for (int64_t i = 0; t->forced && i < cols; i++) {
    z[i] = -INFINITY;
  }
  for (int64_t i = 0; i < t->count; i++) {
    z[t->id[i]] = t->value[i];
  }
}

/* What the text so far does to single logits: the steps of a Sampler that edit, in the order of their list.

   Of a row only the logits that some step touches are looked at. They are read once, edited in float32 as if the row
   were written out, and handed on as a list of differences. Plain C: its work grows with the text, not with the
   vocabulary. */
#ifndef LANEWISE_HISTORY_H
#define LANEWISE_HISTORY_H

#include <stdint.h>

enum { OVER_BOTH, OVER_OUTPUT, OVER_PROMPT };

enum {
  EDIT_ADD,         /* values[i] to ids[i] */
  EDIT_FORBID,      /* ids */
  EDIT_FORBID_TILL, /* ids while the text is shorter than n */
  EDIT_FORBID_AT,   /* ids where it is n long */
  EDIT_SEQUENCES,   /* values[i] to the last of sequence i, if its others are what the text ends with */
  EDIT_PENALTIES,
  EDIT_FADING_PENALTIES,
  EDIT_ENCODER_PENALTY, /* numbers[0] for what is in ids, or else in the prompt */
  EDIT_NGRAM,           /* what would repeat n ids of the text */
  EDIT_ENCODER_NGRAM,   /* what would repeat n ids of `ids`, or else of the prompt */
  EDIT_DRY,
  EDIT_LENGTH_DECAY, /* ids by |logit| * (numbers[0] ** (length - n) - 1) */
  EDIT_FORCE         /* nothing but the ids of sequence i, where the text is values[i] long */
};

enum { PENALTY_REPETITION_LAST = 1, PENALTY_SUMMED = 2, PENALTY_AWAY = 4 };

/* Ids are in 0 .. cols - 1 but in offsets' sequences; last_n is -1 for all there is. */
struct edit_step {
  int64_t kind, over, counts_over, last_n, n, flags, limit;
  double numbers[3]; /* penalties: repetition, frequency, presence; DRY: multiplier, base, largest exponent */
  const int64_t *ids;
  const double *values;
  const int64_t *offsets; /* of sequences among ids: sequences + 1 */
  int64_t count;          /* of ids, or of sequences */
};

/* A row of logits and the text it follows: `prompt` ids of `length` in all. */
struct edit_row {
  const void *x;
  int64_t dtype, cols;
  const int64_t *text;
  int64_t prompt, length;
};

/* The logits touched, in the order in which they are first seen, and where each is in a table of open addresses. */
struct touched {
  uint32_t *table;
  uint64_t mask;
  int64_t room, table_room, z_room, count;
  int64_t *id;
  float *before, *value, *sum;
  uint32_t *times;
  int64_t *z;   /* of a text: how long the match with its end is, from each place on */
  int relative; /* values are what is added to logits, which are not read */
  int forced;   /* all that is not touched is forbidden */
};

void touched_free(struct touched *t);

/* The most logits that steps can touch, and the longest text that DRY looks at. */
int64_t edits_bound(const struct edit_step *steps, int64_t count, const struct edit_row *row, int64_t *window);

/* Edits `row`. relative: no step looks at a value, and one at most adds numbers. 0, or -1 without memory. */
int edit_by_text(struct touched *t, const struct edit_step *steps, int64_t count, const struct edit_row *row,
                 int relative);

/* What was touched and changed: adding minus[i] to logit ids[i] gives 0, adding plus[i] then its value; a logit that is
   forbidden is only lowered by infinity. If relative, plus[i] alone is to be added. How many. */
int64_t touched_lists(const struct touched *t, int64_t *ids, float *minus, float *plus);

/* Writes the edited logits into a row of float32; where all else is forbidden, that too. */
void touched_write(const struct touched *t, float *z, int64_t cols);

#endif

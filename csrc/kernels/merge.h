/* Outputs of attention over parts of the keys, joined by their logarithms of sums: sum(exp(lse_i - max) out_i) over
   sum(exp(lse_i - max)). A part with lse -inf is empty: what it holds is not looked at. */

INLINE float largest_lse(const struct merge_args *a, const float *lse) {
  float max = -INFINITY;
  for (int64_t s = 0; s < a->cols && max == max; s++) {
    float one = lse[s * a->lse_part];
    max = one > max || one != one ? one : max;
  }
  return max == INFINITY ? NAN : max;
}

/* What each part counts for; returns the sum before they were divided by it. */
INLINE double part_weights(const struct merge_args *a, const float *lse, float max, double *weights) {
  double sum = 0.0;
  for (int64_t s = 0; s < a->cols; s++) {
    float one = lse[s * a->lse_part];
    weights[s] = one == -INFINITY ? 0.0 : exp64_1(((double)one - (double)max) / a->lse_unit);
    sum += weights[s];
  }
  for (int64_t s = 0; s < a->cols; s++) {
    weights[s] /= sum;
  }
  return sum;
}

static void merge_states(const struct merge_args *a, void *scratch) {
  double *weights = scratch;
  const size_t width = (size_t)a->width;
  FOR_ROWS (r, a) {
    const float *lse = (const float *)a->lse.ptr + r * a->lse_row,
                *values = (const float *)a->values.ptr + r * a->value_row;
    float *out = (float *)a->out.ptr + r * a->width, max = largest_lse(a, lse), joined = max;
    if (max == -INFINITY || max != max) {
      joined = max == max ? max : v_max_across(QUIET_NAN);
      fill(out, width, max == max ? 0.0f : joined);
    } else {
      double sum = part_weights(a, lse, max, weights);
      joined = (float)((double)max + log64_1(sum) * a->lse_unit);
      for (size_t d = 0; d < width; d += LANES) {
        size_t n = min_size(width - d, LANES);
        vf acc = v_set1(0.0f);
        for (int64_t s = 0; s < a->cols; s++) {
          if (lse[s * a->lse_part] != -INFINITY) {
            acc = v_fma(v_load_n(values + s * a->value_part + d, n, 0.0f), v_set1((float)weights[s]), acc);
          }
        }
        acc = v_add(acc, v_set1(0.0f)); /* -0 to 0 */
        v_store_n(out + d, n, v_select(v_unord(acc, acc), QUIET_NAN, acc));
      }
    }
    if (a->out_lse.ptr) {
      ((float *)a->out_lse.ptr)[r] = joined;
    }
  }
}

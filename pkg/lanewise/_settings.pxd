# What a call of sample or its kin is told, as its args struct has it.
from libc.stdint cimport int64_t

from lanewise._arrays cimport rows_t
from lanewise._ops cimport sample_args, sample_params


cdef int fill_steps(int64_t *steps, object preset) except -1

# Says in params which noise each row uses (seed, key and step, or u), and runs the operation; a Stream counts that step.
cdef int draw(int op, const void *args, void *params, rows_t *r, int64_t row_work, object seed, object step, object keys,
              object u, object rng) except -1

# Numbers of SamplingParams, one for all rows or a list, one a row; a keyword beside them is an error.
cdef list from_params(object params, list given, int64_t count)
cdef int fill_numbers(sample_params *p, int64_t rows, object temperature, object top_k, object top_p, object min_p,
                      object min_keep, object repetition_penalty, object frequency_penalty,
                      object presence_penalty) except -1
cdef int fill_penalties(sample_params *p, int64_t rows, object repetition_penalty, object frequency_penalty,
                        object presence_penalty) except -1

# Bias, penalties and masks of a call; returns what the spans point into.
cdef list fill_edits(sample_args *a, rows_t *r, object prompt_ids, object output_ids, object bias, object mask)

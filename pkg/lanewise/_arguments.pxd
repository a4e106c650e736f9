# What calls of sample are told besides logits, checked.
cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from lanewise._arrays cimport rows_t


cdef double number(object value, str name, double low, double high) except? -1
cdef uint64_t integer(object value, str name, int64_t low, uint64_t high) except? 0xdead
cdef bint is_scalar(object value)
cdef list per_row(object value, str name, int64_t rows)

# Write a value, or a row's own, to a double or 64-bit integer that recurs every `step` bytes.
cdef int fill_doubles(void *to, int64_t step, int64_t rows, object value, str name, double low, double high) except -1
cdef int fill_integers(void *to, int64_t step, int64_t rows, object value, str name, int64_t low,
                       uint64_t high) except -1

cdef int word(object value, str name, tuple words) except -1  # which of them it is
cdef int check_on_invalid(object on_invalid) except -1
cdef int check_ties(object ties) except -1               # whether all of them
cdef int ties_of_steps(object ties) except -1            # TIES_TOP_K, TIES_TOP_P

cdef tuple ragged_ids(object ids, str name, rows_t *r)    # (ids, offsets), int64
cdef bint is_sparse(object bias)
cdef tuple sparse_bias(object bias, rows_t *r)            # (ids, float32 values, offsets)
cdef object dense_bias(object bias, rows_t *r)            # float32, (V,) or (B, V)
cdef cnp.ndarray mask_array(object mask, rows_t *r)       # bool or 32-bit words, (n,) or (B, n)

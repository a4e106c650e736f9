# The one input layer: whatever the user has becomes (pointer, dtype, strides, shape), once, for every wrapper.
cimport numpy as cnp
from libc.stdint cimport int64_t

from lanewise._ops cimport span


cdef struct rows_t:
    void *ptr
    int64_t rows, cols, stride  # stride in bytes from row to row, any sign; 0 for a single row
    int64_t dtype               # DTYPE_*
    bint single                 # the user's array had one axis


# Fills `r` for logits named `name` and returns the array that owns the memory: keep it while `r` is used.
cdef object logits_rows(object x, rows_t *r, str name)

cpdef object as_array(object x, str name)
cpdef object in_place(object x, str name)
cdef bint is_bfloat16(object dtype)
cdef object readable(object x, str name)  # aligned, native, float32, float16 or BFLOAT16, the last axis adjacent

cdef span whole(cnp.ndarray a)       # all of a C-contiguous array
cdef span rows_span(rows_t *r)

# `out` as it is, if it has this dtype and shape and may be written.
cdef cnp.ndarray check_out(object out, tuple shape, int dtype, str name)
cdef bint has_shape(cnp.ndarray a, tuple shape)
cdef tuple outs_of(object out, Py_ssize_t count, str what)  # of a tuple or list, its items, each fetched once
cdef bint is_direct(cnp.ndarray a, rows_t *r)
cdef cnp.ndarray target(cnp.ndarray out, rows_t *r)

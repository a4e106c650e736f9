# What sample has in common with others that choose a token a row.
from lanewise._arrays cimport rows_t


cdef object choose(object tokens, bint single, object on_invalid)  # an int, or the array; InvalidLogitsError
cdef object tokens_out(object out, rows_t *r)                      # int64 (B,): out, if the kernel can write to it
cdef object support_of(tuple room)

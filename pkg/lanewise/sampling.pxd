# What sample has in common with others that choose a token a row.
from libc.stdint cimport int64_t

from lanewise._arrays cimport rows_t


cdef object tokens_out(object out, rows_t *r)  # int64 (B,): out, if the kernel can write to it

# What a call gives, an int or the array, of tokens_out's tokens or, if these are None, of the one token; or
# InvalidLogitsError.
cdef object chosen(object tokens, int64_t token, object out, bint single, object on_invalid)
cdef object support_of(tuple room)

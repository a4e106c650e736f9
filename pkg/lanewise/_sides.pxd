# Keys or values as C is told of them: a struct side, and the memory that it strides over.
cimport numpy as cnp
from libc.stdint cimport int64_t

from lanewise._ops cimport side, span


# Of a canonical view (layers, blocks, heads, tokens, head_dim), or (..., pieces, x); the span begins at its first
# element. What is to be written must be writable, no element of it in two places.
cdef int fill_side(cnp.ndarray view, side *s, span *memory, str name, bint written) except -1

# Of a view of one layer, without the axis of layers, that is read.
cdef int fill_layer(cnp.ndarray view, side *s, span *memory, str name) except -1

# Of scales and zeros (layers, blocks, heads, tokens, 2) for a side that `view` has filled.
cdef int fill_scales(cnp.ndarray scales, cnp.ndarray view, side *s, span *memory, str name, bint written) except -1

cdef int64_t dtype_of(cnp.ndarray a, str name) except -1  # DTYPE_*

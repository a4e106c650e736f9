# cython: language_level=3, freethreading_compatible=True
"""Keys or values as C is told of them: a struct side, and the memory that it strides over."""
cimport numpy as cnp
from libc.stdint cimport int64_t, uintptr_t

import numpy as np

from lanewise._arrays cimport is_bfloat16
from lanewise._ops cimport DTYPE_BF16, DTYPE_F16, DTYPE_F32, DTYPE_I8, side, span

cnp.import_array()


cdef int64_t dtype_of(cnp.ndarray a, str name) except -1:
    cdef int kind = cnp.PyArray_TYPE(a)
    if cnp.PyArray_ISNOTSWAPPED(a):
        if kind == cnp.NPY_FLOAT32:
            return DTYPE_F32
        if kind == cnp.NPY_FLOAT16:
            return DTYPE_F16
        if kind == cnp.NPY_INT8:
            return DTYPE_I8
        if is_bfloat16(a.dtype):
            return DTYPE_BF16
    raise TypeError(f"{name} must be float32, float16, bfloat16 or int8, got {a.dtype}")


cdef int fill_side(cnp.ndarray view, side *s, span *memory, str name, bint written) except -1:
    if cnp.PyArray_NDIM(view) != 5 and cnp.PyArray_NDIM(view) != 6:
        raise ValueError(f"{name} must have axes (layers, blocks, heads, tokens, head_dim), got shape {(<object>view).shape}")
    s.layer = cnp.PyArray_STRIDE(view, 0)
    return fill_axes(view, 1, s, memory, name, written)


cdef int fill_layer(cnp.ndarray view, side *s, span *memory, str name) except -1:
    s.layer = 0
    return fill_axes(view, 0, s, memory, name, False)


# From the axis of blocks on.
cdef int fill_axes(cnp.ndarray view, int first, side *s, span *memory, str name, bint written) except -1:
    cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(view) + first
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(view) + first
    cdef int64_t item = cnp.PyArray_ITEMSIZE(view)
    cdef bint in_pieces = cnp.PyArray_NDIM(view) - first == 5
    s.dtype = dtype_of(view, name)
    s.dim = shape[3]
    if in_pieces:
        s.dim *= shape[4]
    if s.dim == 0:
        raise ValueError(f"{name} must have a head_dim of at least 1, got shape {(<object>view).shape}")
    span_of_view(view, memory, name, item, written)
    s.block, s.head, s.token = strides[0], strides[1], strides[2]
    if not in_pieces:
        s.chunk, s.chunk_stride = 1, strides[3]
        if strides[3] == item or s.dim == 1:
            s.chunk, s.chunk_stride = s.dim, s.dim * item
    elif strides[4] != item and shape[4] > 1:
        raise ValueError(f"{name} must have the x elements of a piece of head_dim adjacent, got strides {(<object>view).strides}")
    else:
        s.chunk, s.chunk_stride = shape[4], strides[3]
        if strides[3] == s.chunk * item or shape[3] == 1:
            s.chunk, s.chunk_stride = s.dim, s.dim * item
    s.scale_layer = s.scale_block = s.scale_head = s.scale_token = 0
    return 0


cdef int fill_scales(cnp.ndarray scales, cnp.ndarray view, side *s, span *memory, str name, bint written) except -1:
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(scales)
    if cnp.PyArray_TYPE(scales) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISNOTSWAPPED(scales):
        raise TypeError(f"{name} must be float32, got {scales.dtype}")
    expected = (<object>view).shape[:4] + (2,)
    if (<object>scales).shape != expected:
        raise ValueError(f"{name} must have axes (layers, blocks, heads, tokens, 2), here {expected}, "
                         f"got {(<object>scales).shape}")
    if strides[4] != 4:
        raise ValueError(f"{name} must have scale and zero adjacent, got strides {(<object>scales).strides}")
    span_of_view(scales, memory, name, 4, written)
    s.scale_layer, s.scale_block, s.scale_head, s.scale_token = strides[0], strides[1], strides[2], strides[3]
    return 0


cdef int span_of_view(cnp.ndarray view, span *memory, str name, int64_t item, bint written) except -1:
    cdef int i
    cdef int64_t last = 0
    cdef bint empty = False
    for i in range(cnp.PyArray_NDIM(view)):
        if cnp.PyArray_DIM(view, i) > 1 and cnp.PyArray_STRIDE(view, i) < 0:
            raise ValueError(f"{name} must have no negative strides, got {(<object>view).strides}")
        empty |= cnp.PyArray_DIM(view, i) == 0
        last += (cnp.PyArray_DIM(view, i) - 1) * cnp.PyArray_STRIDE(view, i)
    memory.ptr = cnp.PyArray_DATA(view)
    memory.bytes = 0 if empty else last + item
    if not cnp.PyArray_ISALIGNED(view):
        raise ValueError(f"{name} must be aligned to its {item}-byte elements, got address "
                         f"{<uintptr_t>memory.ptr:#x} and strides {(<object>view).strides}")
    if written and not cnp.PyArray_ISWRITEABLE(view):
        raise ValueError(f"{name} is read-only")
    if written and not empty and overlaps_itself(view, item):
        raise ValueError(f"{name} has elements that share memory, got strides {(<object>view).strides}")
    return 0


# Axes by their strides: each step must leave what the smaller ones reach.
cdef bint overlaps_itself(cnp.ndarray view, int64_t item) except -1:
    cdef int i, j, axes = cnp.PyArray_NDIM(view), at
    cdef int64_t reach = item
    cdef int seen = 0
    for j in range(axes):
        at = -1
        for i in range(axes):
            if not seen >> i & 1 and (at < 0 or cnp.PyArray_STRIDE(view, i) < cnp.PyArray_STRIDE(view, at)):
                at = i
        seen |= 1 << at
        if cnp.PyArray_DIM(view, at) > 1:
            if cnp.PyArray_STRIDE(view, at) < reach:
                return True
            reach += (cnp.PyArray_DIM(view, at) - 1) * cnp.PyArray_STRIDE(view, at)
    return False

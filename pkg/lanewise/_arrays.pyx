# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""The one input layer: NumPy arrays, whatever exports DLPack or the buffer protocol, and plain lists; and where results
may be written.

float32 and float16 are used in place, and so is bfloat16 (as ml_dtypes or DLPack has it). What a kernel cannot read
in place (float64, another byte order, elements that are not adjacent, odd addresses) is copied.
"""
cimport numpy as cnp
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint64_t

import numpy as np

from lanewise._ops cimport DTYPE_BF16, DTYPE_F16, DTYPE_F32, span, to_float32

cnp.import_array()


cdef extern from *:
    """
    /* DLPack 0.x, the unversioned capsule that every exporter still offers (dmlc/dlpack, dlpack.h) */
    typedef struct { int32_t type, id; } lw_dl_device;
    typedef struct { uint8_t code, bits; uint16_t lanes; } lw_dl_dtype;
    typedef struct {
      void *data; lw_dl_device device; int32_t ndim; lw_dl_dtype dtype;
      int64_t *shape, *strides; uint64_t byte_offset;
    } lw_dl_tensor;
    typedef struct lw_dl_managed {
      lw_dl_tensor tensor; void *context; void (*deleter)(struct lw_dl_managed *);
    } lw_dl_managed;
    """
    ctypedef struct lw_dl_device:
        int32_t type, id
    ctypedef struct lw_dl_dtype:
        uint8_t code, bits
        uint16_t lanes
    ctypedef struct lw_dl_tensor:
        char *data
        lw_dl_device device
        int32_t ndim
        lw_dl_dtype dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct lw_dl_managed:
        lw_dl_tensor tensor
        void (*deleter)(lw_dl_managed *) noexcept


BFLOAT16 = np.dtype([("bfloat16", "u2")], align=True)  # two bytes that are a bfloat16; NumPy has no such dtype of its own
_DL_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}  # DLPack's type codes; 4 is bfloat16
_DL_CPU = 1


cdef class _Tensor:
    """An exporter's memory, as bytes: the base of the array made of it, and what keeps it alive."""
    cdef lw_dl_managed *managed
    cdef char *start
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.start, self.size, 0, flags)

    def __dealloc__(self):
        if self.managed != NULL and self.managed.deleter != NULL:
            self.managed.deleter(self.managed)


cdef object from_dlpack(object x, str name):
    device = x.__dlpack_device__()
    if device[0] != _DL_CPU:
        raise TypeError(f"{name} must be in CPU memory, got DLPack device {tuple(device)}")
    capsule = x.__dlpack__()
    if not PyCapsule_IsValid(capsule, "dltensor"):
        raise TypeError(f"{name}: {type(x).__name__}.__dlpack__() gave no 'dltensor' capsule")
    cdef _Tensor owner = _Tensor()
    owner.managed = <lw_dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")
    PyCapsule_SetName(capsule, "used_dltensor")
    cdef lw_dl_tensor *t = &owner.managed.tensor
    if t.dtype.code == 4 and t.dtype.bits == 16:
        dtype = BFLOAT16
    elif t.dtype.code in _DL_KINDS and t.dtype.bits in (8, 16, 32, 64) and t.dtype.lanes == 1:
        dtype = np.dtype(f"{_DL_KINDS[t.dtype.code]}{t.dtype.bits // 8}")
    else:
        raise TypeError(f"{name}: no NumPy dtype for DLPack code {t.dtype.code} with {t.dtype.bits} bits")
    cdef int i
    cdef Py_ssize_t item = dtype.itemsize, step = item, low = 0, high = 0, stride
    shape, strides = [], []
    for i in range(t.ndim - 1, -1, -1):
        stride = t.strides[i] * item if t.strides != NULL else step
        shape.append(t.shape[i])
        strides.append(stride)
        low += min(0, stride * (t.shape[i] - 1))
        high += max(0, stride * (t.shape[i] - 1))
        step *= t.shape[i]
    if 0 in shape:
        return np.empty(shape[::-1], dtype)
    owner.start = t.data + t.byte_offset + low
    owner.size = high - low + item
    return np.ndarray(shape[::-1], dtype, owner, -low, strides[::-1])


cpdef object as_array(object x, str name):
    """`x` as an ndarray, without a copy where there is a way. A bfloat16 one has the dtype BFLOAT16."""
    if isinstance(x, np.ndarray):
        return np.asarray(x)  # a subclass may compare as it likes, and what is checked here is then trusted
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return from_dlpack(x, name)
    array = np.asarray(x)
    if array.dtype == object:
        raise TypeError(f"{name} must be an array of numbers, got {type(x).__name__}")
    return array


cdef bint is_bfloat16(object dtype):
    return dtype == BFLOAT16 or (dtype.itemsize == 2 and dtype.name == "bfloat16")


cdef object readable(object x, str name):
    """`x` as an aligned native array of float32, float16 or BFLOAT16 whose last axis is adjacent."""
    array = as_array(x, name)
    dtype = array.dtype
    if is_bfloat16(dtype):
        array = array.view(BFLOAT16)
    elif dtype.kind == "f" and dtype.itemsize in (2, 4, 8):
        native = np.dtype(f"f{min(dtype.itemsize, 4)}")
        if dtype.itemsize == 8:
            array = to_float32(array)
        elif not dtype.isnative:
            array = array.astype(native)
    else:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {dtype}")
    if array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize or not array.flags.aligned:
        array = array.copy()
    return array


cdef object logits_rows(object x, rows_t *r, str name):
    cdef cnp.ndarray a
    cdef int axis
    if type(x) is not np.ndarray or not is_plain(<cnp.ndarray>x):
        x = readable(x, name)
        if x.ndim not in (1, 2):
            raise ValueError(f"{name} must have shape (V,) or (B, V), got {x.shape}")
        r.dtype = DTYPE_F32 if x.dtype == np.float32 else DTYPE_F16 if x.dtype == np.float16 else DTYPE_BF16
    else:
        r.dtype = DTYPE_F32
    a = x
    axis = cnp.PyArray_NDIM(a) - 1
    r.single = axis == 0
    r.ptr = cnp.PyArray_DATA(a)
    r.cols = cnp.PyArray_DIM(a, axis)
    r.rows = 1 if r.single else cnp.PyArray_DIM(a, 0)
    r.stride = 0 if r.single else cnp.PyArray_STRIDE(a, 0)
    if r.cols == 0:
        raise ValueError(f"{name} must have at least one column, got shape {x.shape}")
    return x


# float32 in place: the common case, decided without a Python call
cdef inline bint is_plain(cnp.ndarray a):
    cdef int axis = cnp.PyArray_NDIM(a) - 1
    return (cnp.PyArray_TYPE(a) == cnp.NPY_FLOAT32 and (axis == 0 or axis == 1) and cnp.PyArray_ISALIGNED(a)
            and cnp.PyArray_ISNOTSWAPPED(a) and cnp.PyArray_STRIDE(a, axis) == 4)


# ---- arrays out ----

cdef span whole(cnp.ndarray a):
    cdef span s
    s.ptr, s.bytes = cnp.PyArray_DATA(a), cnp.PyArray_NBYTES(a)
    return s


cdef span rows_span(rows_t *r):
    cdef span s
    cdef int64_t width = r.cols * (4 if r.dtype == DTYPE_F32 else 2)
    s.ptr, s.bytes = r.ptr, (r.rows - 1) * abs(r.stride) + width if r.rows else 0
    return s


cdef cnp.ndarray check_out(object out, tuple shape, int dtype, str name):
    cdef cnp.ndarray a
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(out).__name__}")
    a = out
    if cnp.PyArray_TYPE(a) != dtype or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must be {cnp.PyArray_DescrFromType(dtype)}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {out.shape}")
    if not cnp.PyArray_ISWRITEABLE(a):
        raise ValueError(f"{name} is read-only")
    return a


# Whether a kernel may write C order to it as it is, and the logits lie elsewhere.
cdef bint is_direct(cnp.ndarray a, rows_t *r):
    cdef char *x = <char *>r.ptr
    cdef char *y = <char *>cnp.PyArray_DATA(a)
    cdef int64_t reach = (r.rows - 1) * r.stride, width = r.cols * (4 if r.dtype == DTYPE_F32 else 2)
    if not cnp.PyArray_IS_C_CONTIGUOUS(a) or not cnp.PyArray_ISALIGNED(a):
        return False
    return y + cnp.PyArray_NBYTES(a) <= x + min(reach, 0) or x + max(reach, 0) + width <= y


# Where a kernel may write rows: out itself, unless its elements are not adjacent or it overlaps the input otherwise than
# as the same rows. Then an array of its own, to be copied to out afterwards.
cdef cnp.ndarray target(cnp.ndarray out, rows_t *r):
    cdef int axis = cnp.PyArray_NDIM(out) - 1
    cdef int64_t stride = cnp.PyArray_STRIDE(out, 0) if axis else 0
    cdef char *x = <char *>r.ptr
    cdef char *y = <char *>cnp.PyArray_DATA(out)
    cdef int64_t x_item = 4 if r.dtype == DTYPE_F32 else 2, y_item = cnp.PyArray_ITEMSIZE(out)
    cdef int64_t x_size = r.cols * x_item, y_size = cnp.PyArray_DIM(out, axis) * y_item
    cdef int64_t x_reach = (r.rows - 1) * r.stride, y_reach = (r.rows - 1) * stride
    if cnp.PyArray_STRIDE(out, axis) != y_item and cnp.PyArray_DIM(out, axis) > 1 or not cnp.PyArray_ISALIGNED(out):
        return np.empty_like(out, order="C", subok=False)
    if x == y and x_item == y_item and (r.rows == 1 or stride == r.stride and abs(stride) >= x_size):
        return out
    if (x + min(x_reach, 0) < y + max(y_reach, 0) + y_size) and (y + min(y_reach, 0) < x + max(x_reach, 0) + x_size):
        return np.empty_like(out, order="C", subok=False)
    return out

# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""The one input layer: NumPy arrays, whatever exports DLPack or the buffer protocol, and plain lists; and where results
may be written.

float32 and float16 are used in place, and so is bfloat16 (as ml_dtypes or DLPack has it). What a kernel cannot read
in place (float64, another byte order, elements that are not adjacent, odd addresses) is copied.
"""
cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

import numpy as np

from lanewise._ops cimport DTYPE_BF16, DTYPE_F16, DTYPE_F32, span, to_float32

cnp.import_array()

cdef enum:
    _MOST_AXES = 32  # of NumPy 1


cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(type kind, cnp.dtype stolen, int axes, cnp.npy_intp *shape, cnp.npy_intp *strides,
                                void *data, int flags, object like)


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
    /* DLPack 1.3: what an exporter's type may offer, for calls without Python in between */
    typedef struct lw_dl_owned {
      uint32_t major, minor; void *context; void (*deleter)(struct lw_dl_owned *); uint64_t flags; lw_dl_tensor tensor;
      int64_t dims[8]; /* what tensor.shape and strides point to */
    } lw_dl_owned;
    typedef struct {
      uint32_t major, minor; void *older, *allocate, *export_owned;
      int (*import_owned)(lw_dl_owned *from, void **object);
      int (*export_borrowed)(void *object, lw_dl_tensor *to);
    } lw_dl_exchange;
    static void lw_dl_give_up(lw_dl_owned *owned) { /* whoever had it may not hold the GIL, or Python may be gone */
      if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)owned->context);
        PyGILState_Release(state);
      }
      free(owned);
    }
    static lw_dl_owned *lw_dl_own(const lw_dl_owned *like, PyObject *owner) {
      lw_dl_owned *owned = (lw_dl_owned *)malloc(sizeof *owned);
      if (owned) {
        *owned = *like;
        owned->tensor.shape = owned->dims;
        owned->tensor.strides = owned->dims + 4;
        owned->deleter = lw_dl_give_up;
        owned->context = owner;
        Py_INCREF(owner);
      }
      return owned;
    }
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
    ctypedef struct lw_dl_owned:
        uint32_t major, minor
        uint64_t flags
        lw_dl_tensor tensor
        int64_t dims[8]
    ctypedef struct lw_dl_exchange:
        uint32_t major
        int (*import_owned)(lw_dl_owned *, void **) except -1
        int (*export_borrowed)(void *, lw_dl_tensor *) except -1
    lw_dl_owned *lw_dl_own(const lw_dl_owned *like, object owner)


BFLOAT16 = np.dtype([("bfloat16", "u2")], align=True)  # two bytes that are a bfloat16; NumPy has no such dtype of its own
_DL_CPU = 1
_DL_DTYPES = {(code, bits): np.dtype(f"{kind}{bits // 8}")  # DLPack's type codes; 4 is bfloat16
              for code, kind in {0: "i", 1: "u", 2: "f"}.items() for bits in (8, 16, 32, 64) if kind != "f" or bits > 8}
_DL_DTYPES |= {(4, 16): BFLOAT16, (6, 8): np.dtype(bool)}


cdef class _Tensor:
    """An exporter's memory: the base of the array made of it, and what keeps it alive."""
    cdef lw_dl_managed *managed

    def __dealloc__(self):
        if self.managed != NULL and self.managed.deleter != NULL:
            self.managed.deleter(self.managed)


cdef object from_dlpack(object x, str name):
    cdef _Tensor owner = _Tensor()
    device = x.__dlpack_device__()
    if device[0] != _DL_CPU:
        raise TypeError(f"{name} must be in CPU memory, got DLPack device {tuple(device)}")
    capsule = x.__dlpack__()
    if not PyCapsule_IsValid(capsule, "dltensor"):
        raise TypeError(f"{name}: {type(x).__name__}.__dlpack__() gave no 'dltensor' capsule")
    owner.managed = <lw_dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")
    PyCapsule_SetName(capsule, "used_dltensor")
    return array_of(&owner.managed.tensor, owner, name)


# As from_dlpack, a tenth of its time, from exporters that offer a table of functions. They lend the memory: x holds it.
cdef object from_exchange(object x, object capsule, str name):
    cdef lw_dl_exchange *table = <lw_dl_exchange *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    cdef lw_dl_tensor t
    if table.major != 1 or table.export_borrowed == NULL:
        return from_dlpack(x, name)
    try:
        table.export_borrowed(<void *>x, &t)
    except Exception as error:
        raise TypeError(f"{name} must be a dense array in CPU memory: {error}") from error
    return array_of(&t, x, name)


cdef object array_of(lw_dl_tensor *t, object owner, str name):
    if t.device.type != _DL_CPU:
        raise TypeError(f"{name} must be in CPU memory, got DLPack device {(t.device.type, t.device.id)}")
    dtype = _DL_DTYPES.get((t.dtype.code, t.dtype.bits)) if t.dtype.lanes == 1 else None
    if dtype is None:
        raise TypeError(f"{name}: no NumPy dtype for DLPack code {t.dtype.code} with {t.dtype.bits} bits")
    if t.ndim > _MOST_AXES:
        raise ValueError(f"{name} may have up to {_MOST_AXES} axes, got {t.ndim}")
    cdef cnp.npy_intp shape[_MOST_AXES]
    cdef cnp.npy_intp strides[_MOST_AXES]
    cdef cnp.npy_intp item = dtype.itemsize, size = item
    cdef int i
    for i in range(t.ndim - 1, -1, -1):
        shape[i] = t.shape[i]
        strides[i] = t.strides[i] * item if t.strides != NULL else size
        size *= shape[i]
    Py_INCREF(dtype)
    array = PyArray_NewFromDescr(cnp.ndarray, dtype, t.ndim, shape, strides if size else NULL,
                                 t.data + t.byte_offset if size else NULL, cnp.NPY_ARRAY_WRITEABLE, None)
    cnp.set_array_base(array, owner)
    return array


cdef class Lender:
    """An array of four axes, lent to a library whose tensors offer a table of functions: views of its first tokens, the
    last axis but one, in a third of the time that the library takes to cut them."""
    cdef lw_dl_owned like
    cdef lw_dl_exchange *table
    cdef object array

    def __cinit__(self, cnp.ndarray array not None, tensor):
        cdef int i
        self.table = <lw_dl_exchange *>PyCapsule_GetPointer(tensor.__dlpack_c_exchange_api__, "dlpack_exchange_api")
        if self.table.major != 1 or self.table.import_owned == NULL or cnp.PyArray_NDIM(array) != 4:
            raise TypeError(f"{tensor.__name__} does not take arrays by DLPack 1, or not of {array.ndim} axes")
        self.array, self.like.major, self.like.minor, self.like.flags = array, 1, 0, 0
        self.like.tensor.data, self.like.tensor.ndim = <char *>cnp.PyArray_DATA(array), 4
        self.like.tensor.device.type, self.like.tensor.device.id, self.like.tensor.byte_offset = _DL_CPU, 0, 0
        self.like.tensor.dtype.code = 4 if is_bfloat16(array.dtype) else 2
        self.like.tensor.dtype.bits, self.like.tensor.dtype.lanes = 8 * cnp.PyArray_ITEMSIZE(array), 1
        for i in range(4):
            self.like.dims[i] = cnp.PyArray_DIM(array, i)
            self.like.dims[4 + i] = cnp.PyArray_STRIDE(array, i) // cnp.PyArray_ITEMSIZE(array)

    def upto(self, int64_t length):
        cdef lw_dl_owned *owned
        cdef void *made = NULL
        if not 0 <= length <= self.like.dims[2]:
            raise ValueError(f"length must be in [0, {self.like.dims[2]}], got {length}")
        owned = lw_dl_own(&self.like, self.array)
        if owned == NULL:
            raise MemoryError("no memory for a tensor")
        owned.dims[2] = length
        self.table.import_owned(owned, &made)
        tensor = <object>made
        Py_DECREF(tensor)  # it came with a reference
        return tensor


cpdef object as_array(object x, str name):
    """`x` as an ndarray, without a copy where there is a way. A bfloat16 one has the dtype BFLOAT16."""
    if cnp.PyArray_CheckExact(x):
        return x
    if cnp.PyArray_Check(x):
        return np.asarray(x)  # a subclass may compare as it likes, and what is checked here is then trusted
    is_negated = getattr(x, "is_neg", None)
    if is_negated is not None and is_negated():  # torch turns the signs when it reads, and DLPack does not know
        x = x.resolve_neg()
    exchange = getattr(type(x), "__dlpack_c_exchange_api__", None)
    if exchange is not None and not getattr(x, "requires_grad", False):  # __dlpack__ says what is wrong with those
        return from_exchange(x, exchange, name)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return from_dlpack(x, name)
    try:
        array = np.asarray(x)
    except ValueError as error:  # lists that are no array
        raise ValueError(f"{name} must be an array of numbers: {error}") from None
    if array.dtype == object:
        raise TypeError(f"{name} must be an array of numbers, got {type(x).__name__}")
    return array


cdef void *_bfloat16 = NULL  # ml_dtypes' dtype, once it was met: asking for its name takes a microsecond


cdef bint is_bfloat16(object dtype):
    global _bfloat16
    if dtype is BFLOAT16 or <void *>dtype == _bfloat16:
        return True
    if dtype.kind != "V" or dtype.itemsize != 2:
        return False
    if dtype.name == "bfloat16":
        if _bfloat16 == NULL:
            Py_INCREF(dtype)  # for good: its address must not become another's
            _bfloat16 = <void *>dtype
        return True
    return dtype == BFLOAT16


cdef object readable(object x, str name):
    """`x` as an aligned native array of float32, float16 or BFLOAT16 whose last axis is adjacent."""
    array = as_array(x, name)
    if dtype_of(array) == DTYPE_F32 and is_plain(array):
        return array
    dtype = array.dtype
    if is_bfloat16(dtype):
        array = array.view(BFLOAT16)
    elif dtype.kind == "f" and dtype.itemsize in (2, 4, 8):
        if dtype.itemsize == 8:
            array = to_float32(array)
        elif not dtype.isnative:
            array = array.astype(dtype.newbyteorder("="))
    else:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {dtype}")
    if array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize or not array.flags.aligned:
        array = array.copy()
    return array


cdef object logits_rows(object x, rows_t *r, str name):
    cdef cnp.ndarray a
    cdef int axis
    x = as_array(x, name)
    r.dtype = dtype_of(<cnp.ndarray>x)
    if r.dtype < 0 or cnp.PyArray_NDIM(x) > 2 or not is_plain(<cnp.ndarray>x):
        x = readable(x, name)
        if x.ndim not in (1, 2):
            raise ValueError(f"{name} must have shape (V,) or (B, V), got {x.shape}")
        r.dtype = DTYPE_F32 if x.dtype == np.float32 else DTYPE_F16 if x.dtype == np.float16 else DTYPE_BF16
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


# The kernels' number of a dtype that they read, else -1, without a Python call
cdef inline int64_t dtype_of(cnp.ndarray a) noexcept:
    cdef int kind = cnp.PyArray_TYPE(a)
    if kind == cnp.NPY_FLOAT32:
        return DTYPE_F32
    if kind == cnp.NPY_FLOAT16:
        return DTYPE_F16
    return DTYPE_BF16 if <void *>cnp.PyArray_DESCR(a) == <void *>BFLOAT16 else -1


# Whether rows can be read in place, decided without one too
cdef inline bint is_plain(cnp.ndarray a) noexcept:
    cdef int axis = cnp.PyArray_NDIM(a) - 1
    return (axis >= 0 and cnp.PyArray_ISALIGNED(a) and cnp.PyArray_ISNOTSWAPPED(a)
            and cnp.PyArray_STRIDE(a, axis) == cnp.PyArray_ITEMSIZE(a))


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
    if not has_shape(a, shape):
        raise ValueError(f"{name} must have shape {shape}, got {out.shape}")
    if not cnp.PyArray_ISWRITEABLE(a):
        raise ValueError(f"{name} is read-only")
    return a


# Of the memory: what a subclass calls its shape is its own affair.
cdef bint has_shape(cnp.ndarray a, tuple shape):
    cdef int i
    if cnp.PyArray_NDIM(a) != len(shape):
        return False
    for i in range(cnp.PyArray_NDIM(a)):
        if cnp.PyArray_DIM(a, i) != shape[i]:
            return False
    return True


# The arrays of a tuple or list that results are to be written to, fetched once: what is checked is what is written to.
cdef tuple outs_of(object out, Py_ssize_t count, str what):
    cdef tuple found = tuple(out) if isinstance(out, (tuple, list)) else ()
    if len(found) != count:
        raise TypeError(f"out must be {what}, got {type(out).__name__}")
    return found


cpdef object in_place(object x, str name):
    """What is to be written to where it is, or a list of such: TypeError for torch's negated views, which are read as
    copies."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, (list, tuple)):
        for i, one in enumerate(x):
            in_place(one, f"{name}[{i}]")
        return x
    is_negated = getattr(x, "is_neg", None)
    if is_negated is not None and is_negated():
        raise TypeError(f"{name} must not be a negated view")
    return x


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

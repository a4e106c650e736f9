"""Arrays of other packages, by DLPack: through __dlpack__, and through the table of functions that a type may offer."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import lanewise
from lanewise._arrays import as_array


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *(("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32)),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        ("byte_offset", ctypes.c_uint64),
    )


Export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))


class Table(ctypes.Structure):
    _fields_ = (
        *(("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)),
        *((name, ctypes.c_void_p) for name in ("older", "allocate", "export_owned", "import_owned")),
        ("export_borrowed", Export),
    )


class Slow:
    """An array that is exported by __dlpack__."""

    def __init__(self, array: Any, code: int = 2, device: int = 1) -> None:
        self.array, self.code, self.device = array, code, device

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


@Export
def export(exporter: Any, to: Any) -> int:
    array = exporter.array
    axes = ctypes.c_int64 * array.ndim
    exporter.kept = axes(*array.shape), axes(*[step // array.itemsize for step in array.strides])
    t = to.contents
    t.data, t.ndim, t.byte_offset = array.ctypes.data, array.ndim, 0
    t.device_type, t.device_id = exporter.device, 0
    t.code, t.bits, t.lanes = exporter.code, 8 * array.itemsize, 1
    t.shape, t.strides = (ctypes.cast(each, ctypes.POINTER(ctypes.c_int64)) for each in exporter.kept)
    return 0


def capsule(table: Table) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(table), NAME, None)


NAME = b"dlpack_exchange_api"
TABLE, OTHER = Table(1, 3, None, None, None, None, export), Table(2, 0, None, None, None, None, export)


class Quick(Slow):
    __dlpack_c_exchange_api__ = capsule(TABLE)


class Newer(Slow):
    """Offers a table of a version that is not known."""

    __dlpack_c_exchange_api__ = capsule(OTHER)

    @property
    def kept(self) -> Any:
        raise AssertionError("its table must not be called")


X = np.arange(60, dtype=np.float32).reshape(3, 4, 5)


@pytest.mark.parametrize("kind", [Slow, Quick, Newer])
@pytest.mark.parametrize(
    "x", [X, X[:, 1], X[::2, 1:, ::-2], X.T, X[:, :0], X[1, 2, 3:4], np.broadcast_to(X[:1], X.shape)]
)
def test_memory_is_shared(kind: type[Slow], x: Any) -> None:
    x = x if x.flags.writeable else X[:1].repeat(3, 0)
    found = as_array(kind(x), "x")
    assert found.shape == x.shape and found.dtype == x.dtype and found.flags.writeable
    np.testing.assert_array_equal(found, x)
    if x.size:
        assert found.ctypes.data == x.ctypes.data and found.strides == x.strides


@pytest.mark.parametrize("kind", [Slow, Quick])
def test_an_exporter_lives_as_long_as_its_array(kind: type[Slow]) -> None:
    found = as_array(kind(np.arange(1000.0)), "x")
    other = np.full(1000, 7.0)  # where it would be, had it been freed
    assert found[999] == 999.0 and other[999] == 7.0


@pytest.mark.parametrize("kind", [Slow, Quick])
def test_functions_take_them(kind: type[Slow]) -> None:
    x = X[0]
    assert np.array_equal(lanewise.softmax(kind(x)), lanewise.softmax(x))
    assert np.array_equal(lanewise.argmax(kind(x)), lanewise.argmax(x))


def test_bfloat16_is_told_from_other_two_bytes() -> None:
    words = np.array([0x3F80, 0x4000], np.uint16)  # 1 and 2
    assert lanewise.scale(Quick(words, code=4), 1.0).tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="must be float32"):
        lanewise.scale(Quick(words, code=1), 1.0)


@pytest.mark.parametrize("kind", [Slow, Quick])
def test_what_cannot_be_read_is_refused(kind: type[Slow]) -> None:
    with pytest.raises(TypeError, match=r"logits must be in CPU memory, got DLPack device \(2, 0\)"):
        lanewise.softmax(kind(X[0], device=2))


def test_errors_of_the_table() -> None:
    with pytest.raises(TypeError, match="logits: no NumPy dtype for DLPack code 5 with 32 bits"):
        lanewise.softmax(Quick(X[0], code=5))
    many = Quick(np.zeros((1,) * 32, np.float32))
    many.array = type(
        "Many", (), {"ndim": 33, "shape": (1,) * 33, "strides": (4,) * 33, "itemsize": 4, "ctypes": X.ctypes}
    )
    with pytest.raises(ValueError, match="up to 32 axes, got 33"):
        lanewise.softmax(many)


class Negated(Slow):
    """As torch has it: memory whose signs are to be turned."""

    def is_neg(self) -> bool:
        return True

    def resolve_neg(self) -> Slow:
        return Slow(-self.array)


def test_signs_that_are_yet_to_be_turned_are_turned() -> None:
    x = np.float32([1, 5, 3])
    assert lanewise.argmax(Negated(x)) == 0 and lanewise.argmax(Slow(x)) == 1

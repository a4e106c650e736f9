from __future__ import annotations

import gc
import importlib
import sys

import numpy as np
import onnxruntime
import pytest
import tiny
from onnx import TensorProto
from onnxruntime import OrtValue

import lanewise
import lanewise.compat.onnxruntime as ours

import page

SETTINGS = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5, "step": 0}


def run(ids: list[list[int]], dtype: str = "float32") -> OrtValue:
    session = onnxruntime.InferenceSession(tiny.model(tiny.table(), dtype))
    feeds = {"input_ids": OrtValue.ortvalue_from_numpy(np.array(ids, np.int64))}
    return session.run_with_ort_values(["logits"], feeds)[0]


@pytest.mark.parametrize("dtype", tiny.FLOATS)
def test_no_copy(dtype: str) -> None:
    value = run([[1, 2, 3], [4, 5, 6]], dtype)
    rows = ours.logits(value)
    assert rows.shape == (2, 50) and rows.dtype.itemsize * 50 * 3 == rows.strides[0]
    assert rows.ctypes.data == value.data_ptr() + 2 * 50 * rows.dtype.itemsize
    exact = tiny.table()[[3, 6]]
    assert np.allclose(lanewise.scale(rows, 1.0), exact, rtol=0.005)
    if dtype != "bfloat16":  # which OrtValue.numpy() does not know
        assert np.array_equal(rows, value.numpy()[:, -1])


@pytest.mark.parametrize("dtype", tiny.FLOATS)
def test_tokens(dtype: str) -> None:
    value = run([[1, 2, 3], [4, 5, 6]], dtype)
    rounded = lanewise.scale(ours.logits(value), 1.0)
    assert ours.sample(value, temperature=0.0).tolist() == rounded.argmax(1).tolist()
    assert ours.sample(value, **SETTINGS).tolist() == lanewise.sample(rounded, **SETTINGS).tolist()
    several = lanewise.SamplingParams(temperature=0.5)
    assert ours.sample(value, several, seed=1, step=2).tolist() == [
        lanewise.sample(row, temperature=0.5, seed=1, step=2, keys=key) for key, row in enumerate(rounded)
    ]


def test_positions() -> None:
    ids = [[1, 2, 3], [4, 5, 6]]
    value, rows = run(ids), tiny.table()
    assert np.array_equal(ours.logits(value, position=0), rows[[1, 4]])
    assert np.array_equal(ours.logits(value, position=[0, 2]), rows[[1, 6]])
    assert np.array_equal(ours.logits(value, position=np.array([-1, -2])), rows[[3, 5]])
    assert ours.sample(value, position=[1, 0], temperature=0.0).tolist() == rows[[2, 4]].argmax(1).tolist()
    with pytest.raises(IndexError):
        ours.logits(value, position=3)


@pytest.mark.parametrize("shape", [(50,), (2, 50)])
def test_fewer_axes(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).normal(0, 3, shape).astype(np.float32)
    value = OrtValue.ortvalue_from_numpy(array)
    token = ours.sample(value, **SETTINGS)
    assert np.array_equal(token, lanewise.sample(array, **SETTINGS)) and type(token) is type(lanewise.sample(array))
    assert np.array_equal(ours.sample(array, **SETTINGS), token)


def test_nothing_in_it() -> None:
    empty = OrtValue.ortvalue_from_shape_and_type([0, 3, 50], TensorProto.FLOAT)
    assert ours.logits(empty).shape == (0, 50) and ours.sample(empty).shape == (0,)


def test_the_array_keeps_the_value() -> None:
    rows = ours.logits(run([[1, 2]]))
    gc.collect()
    others = [run([[9, 8]]) for _ in range(8)]
    assert np.array_equal(rows, tiny.table()[[2]]) and len(others) == 8


def test_bound_outputs() -> None:
    session = onnxruntime.InferenceSession(tiny.model(tiny.table()))
    binding = session.io_binding()
    binding.bind_cpu_input("input_ids", np.array([[1, 2]], np.int64))
    binding.bind_output("logits")
    session.run_with_iobinding(binding)
    assert ours.sample(binding.get_outputs()[0], temperature=0.0).tolist() == [tiny.table()[2].argmax()]


def test_what_is_no_logits() -> None:
    with pytest.raises(TypeError, match=r"floats, got tensor\(int64\)"):
        ours.logits(OrtValue.ortvalue_from_numpy(np.zeros((2, 5), np.int64)))
    with pytest.raises(TypeError, match="CPU memory, got Cuda"):
        ours.logits(Elsewhere())
    with pytest.raises(lanewise.InvalidLogitsError):
        ours.sample(OrtValue.ortvalue_from_numpy(np.full((1, 5), np.nan, np.float32)))
    with pytest.raises(TypeError, match="top_q"):
        ours.sample(run([[1]]), top_q=1)


class Elsewhere:
    """An OrtValue of a device that is not here."""

    def is_tensor(self) -> bool:
        return True

    def device_name(self) -> str:
        return "Cuda"

    def element_type(self) -> int:
        return 1

    def data_ptr(self) -> int:
        raise AssertionError("its memory is not to be read")


def test_the_logits_may_be_edited_in_place() -> None:
    value = run([[1, 2], [3, 4]])
    rows = ours.logits(value)
    lanewise.apply_bias(rows, {5: 1000.0}, out=rows)
    assert value.numpy()[:, -1].argmax(1).tolist() == [5, 5]
    assert np.array_equal(value.numpy()[:, 0], tiny.table()[[1, 3]])


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "lanewise.compat.onnxruntime")
    with pytest.raises(ImportError, match=r"onnxruntime 1\.20 to 1\.32 is needed"):
        importlib.import_module("lanewise.compat.onnxruntime")


def test_page_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    page.run_section("onnxruntime, onnxruntime-genai")
    page.run_example("with_onnxruntime")
    assert capsys.readouterr().out.startswith("the ")
    page.run_example("with_onnxruntime_genai")
    assert capsys.readouterr().out.startswith("the ")

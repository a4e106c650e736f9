"""Every Case, recorded on the scalar ISA and done again without Python, all its memory between guard pages."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

import lanewise
from lanewise import _dispatch, _ops

from compiled import compiled
from record import SPAN, Recording, record

pytestmark = pytest.mark.native


def replay(recording: Path, isa: str) -> tuple[int, str]:
    done = subprocess.run([compiled() / "replay", recording, isa], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled()
    path = tmp_path_factory.mktemp("replay") / "recording"
    record(path)
    return path


@pytest.mark.parametrize("isa", _dispatch.runnable())
def test_every_case_leaves_the_same_bytes(recorded: Path, isa: str) -> None:
    status, said = replay(recorded, isa)
    calls = struct.unpack_from("<q", recorded.read_bytes(), 8)[0]
    assert (status, said) == (0, f"replay {isa}: {calls} calls, 2 placements each, 0 wrong\n")
    assert calls > 1000


# ---- what the driver is there to find, it finds ----

Call = tuple[bytes, list[bytes | None], list[bytes | None]]
FIELDS = ("rows", "first_row", "cols", "dtype", "x_stride", "out_stride")  # of struct row_args, after its spans


@pytest.fixture
def softmax() -> Call:
    """Args and memory of one call on 16 elements."""
    calls = []
    _ops.set_recorder(lambda operation, *call: calls.append(call))
    try:
        lanewise.softmax(np.arange(16, dtype=np.float32))
    finally:
        _ops.set_recorder(None)
    return calls[0]


def said(folder: Path, call: Call) -> str:
    recording = Recording("label")
    recording.add("softmax", *call)
    recording.write(folder / "recording")
    status, output = replay(folder / "recording", "scalar")
    assert status == 1
    return output


def test_driver_finds_another_byte(tmp_path: Path, softmax: Call) -> None:
    args, before, after = softmax
    assert after[1] is not None
    after[1] = after[1][:-1] + bytes([after[1][-1] ^ 1])
    output = said(tmp_path, (args, before, after))
    assert "softmax label, ending at a guard page: span 1, offset 63: differs" in output
    assert "1 calls, 2 placements each, 2 wrong" in output


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"cols": 17}, "ending at a guard page: span 0, offset 64: touched a guard page"),
        ({"rows": 2, "x_stride": -64}, "beginning behind a guard page: span 0, offset -64: touched a guard page"),
        ({"rows": 2, "out_stride": 64}, "ending at a guard page: span 1, offset 64: touched a guard page"),
        ({"rows": 2, "out_stride": -64}, "ending at a guard page: span 1, offset -64: was written outside"),
    ],
)
def test_driver_finds_an_access_outside(tmp_path: Path, softmax: Call, fields: dict[str, int], found: str) -> None:
    args, before, after = softmax
    changed = bytearray(args)
    for name, value in fields.items():
        struct.pack_into("<q", changed, SPAN.size * len(before) + 8 * FIELDS.index(name), value)
    assert found in said(tmp_path, (bytes(changed), before, after))

"""The benches run and print what they promise, for every view; and nothing is put beside that does other work."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

import lanewise
from lanewise import _measure

from commands import ROOT, run

pytestmark = pytest.mark.native

ISAS = lanewise.info()["usable"]
VIEWS = "table", "bars", "kv", "attention", "article", "peers", "readme"
CELL = (
    r"(?P<operation>\S.*?) +(?P<vocab>[\d,]+)  (?P<kind>\w+(, \w+)?) +(?P<isa>\w+) +(?P<us>[\d.]+) +"
    r"(?P<times>[\d.]+) (?P<floor>F\d(\+F\d)*)( +[\w.-]+ [\d.e+]+x)*"
)


class Result(NamedTuple):
    printed: list[str]
    rows: list[dict[str, Any]]
    notes: str


def check_cells(printed: list[str]) -> list[dict[str, str]]:
    """Every line of a table has microseconds and the multiple of a floor."""
    cells = [match.groupdict() for line in printed if (match := re.fullmatch(CELL, line))]
    for cell in cells:
        assert all(float(cell[name]) > 0 for name in ("us", "times")), cell
    return cells


def check_ordinary(cells: list[dict[str, str]]) -> None:
    """A line an operation and ISA, on ordinary rows."""
    ordinary = [(cell["operation"], cell["isa"]) for cell in cells if cell["kind"] == "realistic"]
    assert sorted(ordinary) == sorted((operation.name, isa) for operation in _measure.OPERATIONS for isa in ISAS)


def test_bench_of_the_package_has_a_number_in_every_row() -> None:
    cells = check_cells(run("lanewise", "bench", "--quick"))
    check_ordinary(cells)
    assert {cell["kind"] for cell in cells} == {"realistic"}


@pytest.fixture(scope="module")
def in_repository() -> None:
    if not (ROOT / "bench").is_dir():
        pytest.skip("bench/ is in the repository and the sdist, not beside these tests")


@pytest.fixture(scope="module")
def folder(in_repository: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Result]:
    """Every view, run once and quickly."""

    def view(name: str) -> list[str]:
        return run("bench", "--quick", "--results", str(folder), *[f"--{name}"] * (name != "table"))

    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outputs = pool.map(view, VIEWS)
    for name, printed in zip(VIEWS, outputs, strict=True):
        (path,) = folder.glob(f"{name}-*.json")
        saved = json.loads(path.read_text())
        found[name] = Result(printed, saved["rows"], saved["notes"])
    return found


def test_the_table_has_rows_hot_just_written_and_cold(results: dict[str, Result]) -> None:
    printed, rows, _ = results["table"]
    cells = check_cells(printed)
    check_ordinary(cells)
    assert {cell["kind"] for cell in cells} == {"realistic", "ties", "realistic, written", "realistic, cold"}
    assert len(cells) == len(rows)
    assert all(math.isfinite(row["us"]) and row["over_floor"] > 0 for row in rows)
    assert all("NumPy" in row["peers"] for row in rows if row["kind"] == "realistic" and row["isa"] == ISAS[0])


BARS = {
    "softmax", "log_softmax", "logsumexp", "top_k, k = 50", "top_k, k = 50, any row", "sample, any setting and row",
    "T, top-k 50, top-p 0.9", "the same, 512 penalised ids", "the same, ties", "the same, sorted or flat",
    "the same, mask of 1 %, clustered", "the same, mask of random 1 to 90 %", "T alone",
    "T, top-p 0.9, realistic or peaked", "top-p 0.5 to 0.99, any row", "the same, return_support",
    "the same, top_p_mask", "T, min-p 0.05", "logprobs: chosen, top 20, rank", "T, top-k 50, top-p 0.9, cold",
    "softmax / onnxruntime", "log_softmax / onnxruntime", "sample: full pipeline / onnxruntime-genai",
    "sample: full pipeline / llama.cpp", "sample: full pipeline / torch", "sample: full pipeline / transformers",
    "sample: T 0.7 / torch.multinomial", "sample: T 0.7 / torch", "4 rows, cold, full, one core",
    "4 rows, cold, full, two cores", "a call on 16 elements with out=", "wrong sets: return_support, top_p_mask",
    "tokens that differ: ISA, batch, order", "llama.cpp's chain with DRY and XTC, 512 ids", "mirostat 2",
    "typical 0.9", "top-n-sigma 1", "a row of a Sampler added and removed", "a step of a Sampler on 16 logits",
}  # fmt: skip


def test_every_bar_is_judged_or_said_to_be_missing(results: dict[str, Result]) -> None:
    printed, rows, notes = results["bars"]
    judged = [line for line in printed if line.startswith(("PASS", "over"))]
    for row, line in zip(rows, judged, strict=True):
        passed = row["measured"] >= row["limit"] if row["at_least"] else row["measured"] <= row["limit"]
        assert line.startswith("PASS" if passed else "over") and f"{row['measured']:.2f}" in line
    absent = {bar for bar in BARS if (peer := bar.partition(" / ")[2]) and peer in re.split(r"[ ,\n]+", notes)}
    assert {row["what"] for row in rows} == BARS - absent
    assert rows[-1]["what"] == "tokens that differ: ISA, batch, order"
    assert all(row["measured"] == 0 for row in rows if row["limit"] == 0)


def test_the_bars_of_the_kv_cache_are_judged(results: dict[str, Result]) -> None:
    printed, rows, _ = results["kv"]
    judged = [line for line in printed if line.startswith(("PASS", "over"))]
    assert [line.split("  ")[1] for line in judged] == [row["what"] for row in rows]
    assert {row["what"].split(",")[0].split("(")[0] for row in rows} >= {
        "gather",
        "scatter",
        "zero",
        "append_kv",
        "PagedKVCache.append",
        "allocate",
        "fork",
        "match",
        *["PagedCache"] * bool(find_spec("transformers")),
    }
    assert all(math.isfinite(row["measured"]) and row["measured"] > 0 for row in rows)


def test_the_bars_of_attention_are_judged(results: dict[str, Result]) -> None:
    printed, rows, _ = results["attention"]
    judged = [line for line in printed if line.startswith(("PASS", "over", "none"))]
    assert [line.split("  ")[1] for line in judged] == [row["what"] for row in rows]
    assert all(line.startswith("none") == (row["limit"] == 0) for row, line in zip(rows, judged, strict=True))
    decoded = [row for row in rows if row["unit"] == "% of roof" and row["what"].startswith("decode")]
    assert len(decoded) == 8 and {row["what"] for row in decoded} == {
        f"decode, {dtype}" for dtype in ("f32", "bf16", "f16", "int8")
    }
    assert {row["what"].split(",")[0] for row in rows} == {"decode", "extend"}
    assert all(math.isfinite(row["measured"]) and row["measured"] > 0 for row in rows)
    forms = {row["what"].partition(" / torch, ")[2].partition(":")[0] for row in rows}
    assert bool(find_spec("torch")) == (forms >= {"best", "SDPA folded", "SDPA enable_gqa"})


def test_the_article_has_its_six_steps(results: dict[str, Result]) -> None:
    printed, rows, _ = results["article"]
    assert [row["step"] for row in rows if row["us"] is None] == ["beam-search scoring"]
    assert len(rows) == 6 and all("NumPy" in row["peers"] for row in rows if row["us"] is not None)
    assert [line.split("  ")[0] for line in printed[1:7]] == [row["step"] for row in rows]


def test_peers_are_put_beside_or_named_as_absent(results: dict[str, Result]) -> None:
    printed, rows, notes = results["peers"]
    assert len(check_cells(printed)) == len(rows)
    assert [row["operation"] for row in rows] == [o.name for o in _measure.OPERATIONS if o.setting is not None]
    beside = {peer for row in rows for peer in row["peers"]}
    for module, peer in (("torch", "torch"), ("onnxruntime_genai", "onnxruntime-genai"), ("llama_cpp", "llama.cpp")):
        assert (peer in beside) == bool(find_spec(module)) == (peer not in re.split(r"[ ,\n]+", notes))


def test_the_number_of_the_readme_is_beside_one_read(results: dict[str, Result]) -> None:
    rows = {row["what"]: row for row in results["readme"].rows}
    assert rows["reading it once"]["over_reading"] == 1 and rows["lanewise"]["over_lanewise"] == 1
    assert rows["lanewise"]["over_reading"] > 0 and "NumPy" in rows


def test_results_are_put_into_a_page(results: dict[str, Result], folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    shutil.copy(ROOT / "docs/performance.md", page)
    for _ in range(2):  # over what was there, then over itself
        run("bench", "--results", str(folder), "--docs", str(page))
    before, after = ((ROOT / "docs/performance.md").read_text(), page.read_text())
    assert before.split("<!-- begin: measured -->")[0] == after.split("<!-- begin: measured -->")[0]
    for name, result in results.items():
        heading = "`python -m bench`" if name == "table" else f"`python -m bench --{name}`"
        assert after.count(f"\n{heading}: ") == 1
        assert (tmp_path / f"performance-{name}.png").exists() == any(line.endswith(".png") for line in result.printed)
    assert after.count("\n| ") >= sum(len(result.rows) for name, result in results.items() if name != "table")


@pytest.fixture
def peers(in_repository: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("LANEWISE_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # bench sets them for its process; here they are put back
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.peers")


@pytest.mark.parametrize("name", _measure.BY_NAME)
def test_who_does_other_work_is_found_out(peers: ModuleType, name: str) -> None:
    operation = _measure.BY_NAME[name]
    draws = operation.setting is not None
    check = peers.check_draws if draws else peers.check_values
    check(operation, operation.numpy)
    for other in ("sample: greedy", "sample: T 1") if draws else ("softmax", "argmax"):
        if other != name:
            with pytest.raises(AssertionError):
                check(operation, _measure.BY_NAME[other].numpy)


def test_a_row_just_written_is_the_row() -> None:
    rows = [np.random.default_rng(seed).normal(size=1000).astype(np.float32) for seed in range(3)]
    for row, written in zip([*rows, *rows], _measure.just_written(rows), strict=False):
        assert row.tobytes() == written.tobytes()

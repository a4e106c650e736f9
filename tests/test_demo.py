"""The command line and the demo run, and print what they promise; and the real rows are what they say."""

from __future__ import annotations

import io
import re
import sys

import numpy as np
import pytest

import lanewise
from lanewise import _measure, _numpy_way, _rows, cli, demo

from commands import run

pytestmark = pytest.mark.native

ISAS = lanewise.info()["usable"]


# ---- the rows ----


@pytest.mark.parametrize("row", _rows.real_rows(), ids=lambda row: row.name)
def test_a_real_row_is_what_its_description_says(row):
    assert row.logits.shape == (49152,) and row.logits.dtype == np.float16
    assert np.isfinite(row.logits).all()
    assert row.greedy == row.logits.argmax()
    assert set(row.tokens) == set(np.argsort(-row.logits, kind="stable")[:200].tolist())
    assert row.prompt and all(0 <= id_ < 49152 for id_ in row.prompt_ids)


def test_one_real_row_has_a_tie_at_the_top():
    tied = {row.name: int(np.sum(row.logits == row.logits.max())) for row in _rows.real_rows()}
    assert {name for name, count in tied.items() if count > 1} == {"chinese"} and tied["chinese"] == 2


@pytest.mark.parametrize("kind", _rows.KINDS)
def test_a_made_row_has_something_to_choose_and_repeats(kind):
    make = _rows.KINDS[kind]
    row = make(5000, np.random.default_rng(7))
    assert row.shape == (5000,) and row.dtype == np.float32 and row.flags.c_contiguous
    assert np.isfinite(row.max()) and not np.isnan(row).any()
    assert row.tobytes() == make(5000, np.random.default_rng(7)).tobytes()


# ---- the NumPy way is the same work ----


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_the_numpy_way_gives_the_same_values(name):
    row = _rows.realistic(5000, np.random.default_rng(1))
    np.testing.assert_allclose(getattr(_numpy_way, name)(row), getattr(lanewise, name)(row), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", _measure.SETTINGS)
def test_the_numpy_way_draws_from_the_same_support(name):
    setting, rng = _measure.SETTINGS[name], np.random.default_rng(0)
    row = _rows.realistic(5000, np.random.default_rng(8))
    prompt = {"prompt_ids": list(range(40))} if "repetition_penalty" in setting else {}
    _, support = lanewise.sample(row, **setting, **prompt, seed=0, step=0, return_support=True)
    drawn = {_numpy_way.sample(row, rng, **setting, **prompt) for _ in range(300)}
    assert drawn <= set(support.ids.tolist())
    assert support.ids[support.logprobs.argmax()] in drawn


# ---- what is printed ----


def test_info_shows_what_info_returns(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for name, binding in lanewise.info()["operations"].items():
        assert any(re.fullmatch(rf"  {name} +{binding['isa']}, {re.escape(binding['why'])}", line) for line in printed)
    assert f"{'usable':<12} {', '.join(ISAS)}" in printed
    assert max(map(len, (line for line in printed if not line.startswith("cache")))) <= 100


def test_demo_draws_equal_tokens_on_every_isa():
    printed = run("lanewise", "demo")
    rows = _rows.real_rows()
    for row in rows:
        candidate = re.escape(demo.quoted(row.text(row.greedy), 14))
        assert any(re.fullmatch(rf"  {candidate} +\d+\.\d%( +█+)?", line) for line in printed)
    draws = [line for line in printed if line.lstrip().startswith(tuple(_measure.SETTINGS)) and line.endswith("x")]
    assert len(draws) == len(rows) * len(_measure.SETTINGS)
    assert all(re.search(r"[\d.]+ us +\d+ us +[\d.]+x$", line) for line in draws)
    ids = {isa: [int(id_) for id_ in ids] for isa, *ids in map(str.split, filter(None, printed)) if isa in ISAS}
    batch = np.stack([row.logits for row in rows])
    assert ids == dict.fromkeys(ISAS, lanewise.sample(batch, top_p=0.9, seed=1, step=0).tolist())
    assert printed[-1] == f"  equal on {', '.join(ISAS)}"
    assert max(map(demo.columns, printed)) <= 100


def test_demo_prints_to_what_knows_only_ascii(monkeypatch):
    chinese = [row for row in _rows.real_rows() if row.name == "chinese"]
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(demo, "real_rows", lambda: chinese)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["demo"]) == 0
    terminal.seek(0)
    printed = terminal.read()
    assert "\\u5317\\u4eac" in printed and re.search(r"9\.0%  #+\n", printed)

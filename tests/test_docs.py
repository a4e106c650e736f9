"""What is written is true: examples run; names, signatures, presets, links and make targets are those that exist."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import io
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lanewise

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMPILED = (*sorted(page.stem for page in (ROOT / "pkg/lanewise").glob("*.pyx")),)
PYTHON = (
    "attention_steps",
    "beams",
    "errors",
    "kvcache",
    "params",
    "reference",
    "sequence",
    "state",
    "steps",
    "_dispatch",
)
OPERATIONS = [name for name, group in lanewise._ops.GROUPS.items() if group in ("sampling", "decoding")]
MOVES = [name for name in lanewise.__all__ if name.endswith("_blocks")]
ATTENTION = [  # decode_attention and extend_attention are the kernels attend and attend_merge
    *("decode_attention", "extend_attention", "merge_state", "merge_states"),
    *("softmax_stats", "attention_step", "prefix_cut"),
]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def run_examples(test: doctest.DocTest) -> None:
    report = io.StringIO()
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.write, clear_globs=False)
    assert result.attempted and not result.failed, report.getvalue()


def docstring_examples() -> list[doctest.DocTest]:
    finder, tests = doctest.DocTestFinder(), {}
    for name in COMPILED + PYTHON:
        module = importlib.import_module(f"lanewise.{name}")
        found = finder.find(module, extraglobs={"np": np, "lanewise": lanewise})
        # a compiled module lists its docstrings once more in __test__
        tests.update({test.docstring: test for test in found if test.examples})
    return list(tests.values())


@pytest.mark.parametrize("test", docstring_examples(), ids=lambda test: test.name)
def test_docstring_examples(test: doctest.DocTest) -> None:
    run_examples(test)


# docs/compat.md needs other packages: tests/compat/shared/page.py runs its examples
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "compat.md"], ids=lambda page: page.name)
def test_page_examples(page: Path) -> None:
    """The blocks of a page share their names, as a reader who types them in would have it."""
    names: dict[str, Any] = {}
    for block in re.finditer(r"^```python\n(.*?)^```", text(page), re.M | re.S):
        line = text(page)[: block.start(1)].count("\n")
        if ">>> " in block[1]:
            test = doctest.DocTestParser().get_doctest(block[1], names, page.name, str(page), line)
            run_examples(test)
            names = test.globs
        else:
            exec(compile("\n" * line + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("name", lanewise.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert (inspect.getdoc(getattr(lanewise, name)) or "").strip()


@pytest.mark.parametrize("name", OPERATIONS + MOVES + ATTENTION)
def test_operation_has_signature_row_and_example(name: str) -> None:
    page, operation = text(ROOT / "docs/operations.md"), getattr(lanewise, name)
    assert f"{name}{unannotated(operation)}" in re.sub(r"\s+", " ", page)
    assert re.search(rf"^\| `{name}` \|", page, re.M)
    assert re.search(rf">>> .*lanewise\.{name}\(", operation.__doc__)


def test_every_kernel_of_attention_is_one_of_the_page() -> None:
    kernels = {name for name, group in lanewise._ops.GROUPS.items() if group == "attention"}
    assert kernels - set(ATTENTION) == {"attend", "attend_merge"}


def test_attention_page_has_the_plan() -> None:
    page = re.sub(r"\s+", " ", text(ROOT / "docs/attention.md"))
    (made,), (run,) = (stub_signatures("attention", "AttentionPlan")[name] for name in ("__new__", "run"))
    for name, signature in (("AttentionPlan", made), ("AttentionPlan.run", run)):
        assert name + re.sub(r"\((self|cls), ", "(", str(signature)) in page
    members = {name for name in vars(lanewise.AttentionPlan) if not name.startswith("_")}
    assert members and not [name for name in members - {"run"} if f"`plan.{name}`" not in page]


OWN_PAGE = [lanewise.PagedKVCache, lanewise.Sequence, lanewise.HostOffload, lanewise.Transfer]


@pytest.mark.parametrize("kind", OWN_PAGE, ids=lambda kind: kind.__name__)
def test_cache_page_has_every_method(kind: type) -> None:
    page = re.sub(r"\s+", " ", text(ROOT / "docs/kvcache.md"))
    for name, value in vars(kind).items():
        if not name.startswith("_"):
            assert (inspect.getdoc(value) or "").strip(), name
            if callable(value):
                signature = re.sub(r"^\(self(, )?", "(", str(unannotated(value)))
                assert f"{kind.__name__}.{name}{signature}" in page
            else:
                assert re.search(rf"`(seq\.)?{name}`", page)


def test_cache_page_has_the_constructor() -> None:
    page = re.sub(r"\s+", " ", text(ROOT / "docs/kvcache.md"))
    signature = str(unannotated(lanewise.PagedKVCache.__init__)).replace("(self, ", "(")
    assert f"PagedKVCache{signature}" in page


def unannotated(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def test_sampling_page_has_every_parameter_and_preset() -> None:
    page = text(ROOT / "docs/sampling.md")
    cells = " ".join(re.findall(r"^\| (`[^|]*) \|", page, re.M))
    missing = [name for name in list(inspect.signature(lanewise.sample).parameters)[1:] if f"`{name}`" not in cells]
    assert not missing
    rows = re.findall(r'^\| `"([^"]+)"` \| ([^|]+) \|$', page, re.M)
    assert {name: tuple(steps.replace("-", "_").split(", ")) for name, steps in rows} == lanewise.sampling.PRESETS


def test_samplers_page_has_every_step_and_method() -> None:
    page = text(ROOT / "docs/samplers.md")
    kinds = [
        kind
        for kind in vars(lanewise.steps).values()
        if isinstance(kind, type) and issubclass(kind, lanewise.steps.Step) and kind._kind
    ]
    kinds = [kind for kind in kinds if not kind.__name__.startswith("_")]
    assert len(kinds) > 30
    for kind in kinds:
        fields = ", ".join(field.name for field in dataclasses.fields(kind))
        shown = re.search(rf"`{kind.__name__}\(([^)]*)\)`", page)
        assert shown and (shown[1] == fields or fields.startswith(shown[1].removesuffix("..."))), kind.__name__
    for name, method in vars(lanewise.Sampler).items():
        if not name.startswith("_") and callable(method):
            assert f"Sampler.{name}{inspect.signature(method)}".replace("(self, ", "(").replace("(self)", "()") in page
            assert (inspect.getdoc(method) or "").strip(), name
    orders = dict(re.findall(r'^\| `"[^"]+"` \| `steps\.(\w+)` \| ([^|]+) \|$', page, re.M))
    assert sorted(orders) == sorted(make.__name__ for make in lanewise.steps.PRESETS.values())


def stub_signatures(module: str, kind: str | None = None) -> dict[str, list[inspect.Signature]]:
    """{name: the signature of each overload}, without annotations, of a module's functions or a class's."""
    signatures: dict[str, list[inspect.Signature]] = {}
    body = ast.parse(text(ROOT / f"pkg/lanewise/{module}.pyi")).body
    if kind is not None:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == kind)
    for node in body:
        if isinstance(node, ast.FunctionDef):
            made: dict[str, Any] = {}
            node.decorator_list, node.returns = [], None
            for part in ast.walk(node):
                if isinstance(part, ast.arg):
                    part.annotation = None
            exec(compile(ast.Module([node], []), module, "exec"), made)
            signatures.setdefault(node.name, []).append(inspect.signature(made[node.name]))
    return signatures


@pytest.mark.parametrize("module", COMPILED)
def test_stub_has_the_real_signatures(module: str) -> None:
    """By inspect alone, so that it runs without mypy; stubtest (make lint) looks at more than functions."""
    built, stubs = vars(importlib.import_module(f"lanewise.{module}")), stub_signatures(module)
    assert set(stubs) == {
        name for name, value in built.items() if inspect.isroutine(value) and value.__module__ == f"lanewise.{module}"
    }
    for name, (first, *others) in stubs.items():
        assert str(first) == str(inspect.signature(built[name])), name
        assert all(list(other.parameters) == list(first.parameters) for other in others), name


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if not target.startswith(("http:", "https:")):
            path, _, anchor = target.partition("#")
            to = page.parent / path if path else page
            assert to.exists(), target
            if anchor:
                assert anchor in {slug(h) for h in re.findall(r"^#+ (.+)$", text(to), re.M)}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w%-]+):", text(ROOT / "Makefile"), re.M)
    named = set(re.findall(r"`make ([\w-]+)", text(page))) | set(re.findall(r"^make ([\w-]+)", text(page), re.M))
    assert not [name for name in named if not any(fnmatch(name, target.replace("%", "*")) for target in targets)]

"""What is written is true: examples run, and names, signatures, presets, links and make targets are those that exist."""

import ast
import doctest
import importlib
import inspect
import io
import re
from pathlib import Path

import numpy as np
import pytest

import lanewise

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMPILED = ("sampling", "_ops", "_arrays")
PYTHON = ("errors", "params", "reference", "_dispatch")
OPERATIONS = [name for name in lanewise.__all__ if getattr(lanewise, name) is getattr(lanewise.sampling, name, None)
              and not inspect.isclass(getattr(lanewise, name))]


def text(page):
    return page.read_text(encoding="utf-8")


def run_examples(test):
    report = io.StringIO()
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.write, clear_globs=False)
    assert result.attempted and not result.failed, report.getvalue()


def docstring_examples():
    finder, tests = doctest.DocTestFinder(), {}
    for name in COMPILED + PYTHON:
        module = importlib.import_module(f"lanewise.{name}")
        found = finder.find(module, extraglobs={"np": np, "lanewise": lanewise})
        # a compiled module lists its docstrings once more in __test__
        tests.update({test.docstring: test for test in found if test.examples})
    return list(tests.values())


@pytest.mark.parametrize("test", docstring_examples(), ids=lambda test: test.name)
def test_docstring_examples(test):
    run_examples(test)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_examples(page):
    """The blocks of a page share their names, as a reader who types them in would have it."""
    names = {}
    for block in re.finditer(r"^```python\n(.*?)^```", text(page), re.M | re.S):
        line = text(page)[: block.start(1)].count("\n")
        if ">>> " in block[1]:
            test = doctest.DocTestParser().get_doctest(block[1], names, page.name, str(page), line)
            run_examples(test)
            names = test.globs
        else:
            exec(compile("\n" * line + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("name", lanewise.__all__)
def test_every_public_name_has_a_docstring(name):
    assert (inspect.getdoc(getattr(lanewise, name)) or "").strip()


def test_every_operation_has_an_example():
    assert len(OPERATIONS) >= 7
    for name in OPERATIONS:
        assert re.search(rf">>> .*lanewise\.{name}\(", getattr(lanewise, name).__doc__), name


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_page_has_signature_and_row(name):
    page = text(ROOT / "docs/operations.md")
    assert f"{name}{inspect.signature(getattr(lanewise, name))}" in re.sub(r"\s+", " ", page)
    assert re.search(rf"^\| `{name}` \|", page, re.M)


def test_sampling_page_has_every_parameter_and_preset():
    page = text(ROOT / "docs/sampling.md")
    cells = " ".join(re.findall(r"^\| (`[^|]*) \|", page, re.M))
    missing = [name for name in list(inspect.signature(lanewise.sample).parameters)[1:] if f"`{name}`" not in cells]
    assert not missing
    rows = re.findall(r'^\| `"([^"]+)"` \| ([^|]+) \|$', page, re.M)
    assert {name: tuple(steps.replace("-", "_").split(", ")) for name, steps in rows} == lanewise.sampling.PRESETS


def stub_functions(module):
    """{name: [parameters of each overload]}, a parameter as (name, kind, default as source or None)."""
    functions = {}
    for node in ast.parse(text(ROOT / f"pkg/lanewise/{module}.pyi")).body:
        if isinstance(node, ast.FunctionDef):
            plain, named = node.args.posonlyargs + node.args.args, node.args.kwonlyargs
            defaults = [None] * (len(plain) - len(node.args.defaults)) + node.args.defaults + node.args.kw_defaults
            functions.setdefault(node.name, []).append(
                [(arg.arg, "named" if i >= len(plain) else "plain", default and ast.unparse(default))
                 for i, (arg, default) in enumerate(zip(plain + named, defaults, strict=True))])
    return functions


def real_functions(module):
    """The same of what was built."""
    functions = {}
    for name, value in vars(importlib.import_module(f"lanewise.{module}")).items():
        if type(value).__name__ == "cython_function_or_method" and not name.startswith("_"):
            functions[name] = [
                (p.name, "named" if p.kind is p.KEYWORD_ONLY else "plain", None if p.default is p.empty else repr(p.default))
                for p in inspect.signature(value).parameters.values()]
    return functions


@pytest.mark.parametrize("module", COMPILED)
def test_stub_has_the_real_signatures(module):
    """By inspect alone, so that it runs without mypy; stubtest (make lint) looks at more than functions."""
    stubs, real = stub_functions(module), real_functions(module)
    assert stubs.keys() == real.keys()
    for name, overloads in stubs.items():
        for i, (parameter, kind, default) in enumerate(real[name]):
            assert {overload[i][:2] for overload in overloads} == {(parameter, kind)}, name
            assert {overload[i][2] for overload in overloads} - {None} == {default} - {None}, (name, parameter)
        assert all(len(overload) == len(real[name]) for overload in overloads), name


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if not target.startswith(("http:", "https:")):
            path, _, anchor = target.partition("#")
            to = page.parent / path if path else page
            assert to.exists(), target
            if anchor:
                assert anchor in {slug(h) for h in re.findall(r"^#+ (.+)$", text(to), re.M)}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([\w-]+):", text(ROOT / "Makefile"), re.M))
    named = set(re.findall(r"`make ([\w-]+)", text(page))) | set(re.findall(r"^make ([\w-]+)", text(page), re.M))
    assert named <= targets

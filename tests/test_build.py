"""What is built: symbols, instructions and flags of each unit, and what an sdist and a wheel hold.

The names in brackets are faults of others, as in test_faults.py.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lanewise import _ops
from lanewise._isas import ISAS

from compiled import ROOT, compiled, obstacle, run

pytestmark = pytest.mark.native

MODULES = [importlib.import_module(f"lanewise.{page.stem}") for page in sorted((ROOT / "pkg/lanewise").glob("*.pyx"))]
WRAPPERS = [module for module in MODULES if module is not _ops]
LIBC = {"memcpy", "memmove", "memset", "memcmp"}  # what a compiler calls by itself
WIDE = {"host": set(), "isa_scalar": set(), "isa_avx2": {"ymm"}, "isa_avx512": {"ymm", "zmm"}}


def names(listing: str) -> set[str]:
    return set(re.findall(r" [A-Za-z] (\w+)$", listing, re.M))


def wide_registers(file: Path) -> set[str]:
    return set(re.findall(r"%([yz]mm)", run("objdump", "--disassemble", file)))


@pytest.mark.parametrize("isa", [isa.name for isa in ISAS])
def test_a_unit_exports_its_table_and_calls_no_library(isa: str) -> None:
    unit = compiled("nm") / f"isa_{isa}.o"
    table = {f"lanewise_{isa}"} if isa in _ops.compiled() else set()
    assert names(run("nm", "--extern-only", "--defined-only", unit)) == table
    assert names(run("nm", "--undefined-only", unit)) <= LIBC


@pytest.mark.parametrize("unit", WIDE)
def test_a_unit_keeps_to_its_registers(unit: str) -> None:
    """[PA02] What runs before the dispatcher has chosen, or without its choice, runs on any x86-64."""
    if _ops.MACHINE != "x86_64":
        pytest.skip(f"{_ops.MACHINE} has no such registers")
    assert wide_registers(compiled("objdump") / f"{unit}.o") == WIDE[unit]


@pytest.mark.parametrize("module", WRAPPERS, ids=lambda module: module.__name__)
def test_a_wrapper_uses_no_wide_registers(module: object) -> None:
    """[PA02] As built, whatever flags the environment brought in."""
    if obstacle("objdump"):
        pytest.skip(obstacle("objdump"))
    assert not wide_registers(Path(module.__file__))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_exports_its_initialiser_and_nothing_else(module: object) -> None:
    if obstacle("nm"):
        pytest.skip(obstacle("nm"))
    exported = names(run("nm", "--dynamic", "--defined-only", module.__file__))
    assert exported == {f"PyInit_{module.__name__.rpartition('.')[2]}"}


def test_flags_pin_the_arithmetic_and_no_cpu() -> None:
    """[PA02] -march and -m are for the units' own pragmas."""
    flags = (ROOT / "csrc/flags.txt").read_text().split()
    assert {"-ffp-contract=off", "-fno-math-errno"} <= set(flags)
    assert not [flag for flag in flags if re.match(r"-m|-Ofast|-f(fast|unsafe|finite|associative|reciprocal)", flag)]
    assert 'COMPILE_ARGS = Path("csrc/flags.txt").read_text' in (ROOT / "setup.py").read_text()


@pytest.fixture(scope="module")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources without what was built of them."""
    tree = tmp_path_factory.mktemp("clone") / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "results", "*.egg-info", "*.so", "__pycache__")
    return Path(shutil.copytree(ROOT, tree, ignore=ignored))


@pytest.mark.slow
def test_an_sdist_is_enough_for_a_wheel_and_a_wheel_for_use(clean_tree: Path, tmp_path: Path) -> None:
    """[PA04] In an empty folder, without the repository."""
    reason = obstacle()
    if reason:
        pytest.skip(reason)
    sources = files(clean_tree)
    build(clean_tree, "-c", "import setuptools.build_meta as b; b.build_sdist('made')")
    with tarfile.open(next((clean_tree / "made").glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path)
    (unpacked,) = tmp_path.iterdir()
    assert not sources - files(unpacked)

    build(unpacked, "-c", "import setuptools.build_meta as b; b.build_wheel('made')")
    with zipfile.ZipFile(next((unpacked / "made").glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    package = {name for name in files(clean_tree / "pkg/lanewise") if not name.endswith((".pyx", ".pxd"))}
    assert files(tmp_path / "site/lanewise") == package | {Path(module.__file__).name for module in MODULES}

    code = "import lanewise, numpy; print(lanewise.__file__, lanewise.argmax(numpy.float32([1, 3, 2])))"
    said = build(tmp_path, "-c", code, PYTHONPATH=str(tmp_path / "site"))
    assert said.split() == [str(tmp_path / "site/lanewise/__init__.py"), "1"]


def files(folder: Path) -> set[str]:
    """Paths in it, apart from what setuptools leaves about itself."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {str(path) for path in found if not any(part.endswith(".egg-info") for part in path.parts)}


def build(folder: Path, *arguments: str, **environment: str) -> str:
    command, environment = [sys.executable, *arguments], os.environ | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

"""The dispatcher: the choice for every kind of CPU, an ill py-cpuinfo or cache, and what overrules the choice."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import lanewise
from lanewise import _cpu, _dispatch, _ops, _tune
from lanewise._isas import ISAS

X86 = ("avx512", "avx2", "scalar")
LOGITS = np.linspace(-3, 3, 100, dtype=np.float32)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process in which nothing is chosen yet, with an empty cache; what was chosen before is back afterwards."""
    _dispatch.resolve()
    before = _dispatch._start, _dispatch._forced
    monkeypatch.setenv("LANEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LANEWISE_ISA", raising=False)
    _dispatch._start, _dispatch._forced = None, {}
    _cpu.detect.cache_clear()
    yield
    _dispatch._start, _dispatch._forced = before
    _cpu.detect.cache_clear()
    _dispatch.resolve()


def works() -> None:
    """The package computes, on the best instruction sets that the flags and C allow."""
    _dispatch.reconsider()
    assert lanewise.softmax(LOGITS).sum() == pytest.approx(1)
    assert _ops.bindings() == _dispatch.plan(_cpu.detect()[0], _dispatch.runnable())
    assert set(_ops.bindings().values()) <= set(_dispatch.runnable())


# ---- the choice and the veto, for CPUs that are not here ----

ECX = {"fma": 12, "osxsave": 27, "avx": 28, "f16c": 29}
EBX = {"avx2": 5, "avx512f": 16, "avx512dq": 17, "avx512bw": 30, "avx512vl": 31}
AVX = ("fma", "osxsave", "avx", "f16c")
AVX512 = ("avx512f", "avx512dq", "avx512bw", "avx512vl")


def registers(*bits: str, xcr0: int, max_leaf: int = 13) -> dict[str, int]:
    ecx, ebx = (sum(1 << bit for name, bit in table.items() if name in bits) for table in (ECX, EBX))
    return {"max_leaf": max_leaf, "leaf1_ecx": ecx, "leaf7_ebx": ebx, "xcr0": xcr0}


def allowed(**machine: int) -> tuple[str, ...]:
    return tuple(isa for isa in X86 if _ops.x86_allows(isa, **machine))


CPUS = {  # (what py-cpuinfo lists beside the bits, the bits, xcr0, what is chosen)
    "Nehalem": ("sse4_2 popcnt", (), 0x0, "scalar"),
    "Sandy Bridge": ("sse4_2", ("osxsave", "avx"), 0x7, "scalar"),
    "Haswell": ("bmi2", (*AVX, "avx2"), 0x7, "avx2"),
    "Zen 3": ("sha_ni vaes", (*AVX, "avx2"), 0x207, "avx2"),
    "Skylake-X": ("avx512cd", (*AVX, "avx2", *AVX512), 0xE7, "avx512"),
    "Sapphire Rapids": ("avx512_bf16 avx512_fp16 amx_tile", (*AVX, "avx2", *AVX512), 0x602E7, "avx512"),
    "Knights Landing": ("avx512cd avx512er avx512pf", (*AVX, "avx2", "avx512f"), 0xE7, "avx2"),
    "VM without ZMM": ("", (*AVX, "avx2", *AVX512), 0x7, "avx2"),
    "VM without YMM": ("", (*AVX, "avx2", *AVX512), 0x3, "scalar"),
    "noxsave": ("", ("fma", "avx", "f16c", "avx2", *AVX512), 0x0, "scalar"),
    "no FMA": ("", ("osxsave", "avx", "f16c", "avx2"), 0x7, "scalar"),
    "no F16C": ("", ("osxsave", "avx", "fma", "avx2"), 0x7, "scalar"),
}


@pytest.mark.parametrize("name", CPUS)
def test_x86(name):
    """Also where py-cpuinfo lists what the operating system has masked (DI01: ggml-org/llama.cpp#20940)."""
    more, bits, xcr0, expected = CPUS[name]
    chosen = _dispatch.plan({*more.split(), *bits}, allowed(**registers(*bits, xcr0=xcr0)))
    assert chosen == dict.fromkeys(_ops.NAMES, expected)


@pytest.mark.parametrize("name", CPUS)
def test_flags_and_veto_agree(name):
    """Where nothing is masked, either alone comes to the same: each wants FMA and F16C beside AVX2 (DI05)."""
    _, bits, xcr0, expected = CPUS[name]
    if "VM" not in name and name != "noxsave":
        assert _dispatch.plan(bits, X86)["softmax"] == expected
    assert allowed(**registers(*bits, xcr0=xcr0))[0] == expected


def test_veto_wants_every_bit():
    bits = (*AVX, "avx2", *AVX512)
    for bit in bits:
        got = allowed(**registers(*(b for b in bits if b != bit), xcr0=0xE7))
        assert got == (("avx2", "scalar") if bit in AVX512 else ("scalar",)), bit
    for xcr0 in range(0x100):
        expected = X86 if xcr0 & 0xE6 == 0xE6 else X86[1:] if xcr0 & 6 == 6 else X86[2:]
        assert allowed(**registers(*bits, xcr0=xcr0)) == expected, hex(xcr0)


def test_veto_believes_no_register_that_is_not_there():
    """XCR0 means nothing without OSXSAVE (DI02: dotnet/coreclr#8939), leaf 7 nothing below a maximum of 7."""
    bits = (*AVX, "avx2", *AVX512)
    assert allowed(**registers(*(b for b in bits if b != "osxsave"), xcr0=2**64 - 1)) == ("scalar",)
    assert allowed(**registers(*bits, xcr0=0xE7, max_leaf=6)) == ("scalar",)
    assert not _ops.x86_allows("neon", **registers(*bits, xcr0=0xE7))


def test_veto_says_whose_fault_it_is():
    bits = (*AVX, "avx2", *AVX512)
    assert "XCR0 = 0x7" in _dispatch.veto("avx512", registers(*bits, xcr0=7))
    assert "operating system" in _dispatch.veto("avx2", registers("fma", "avx", "f16c", "avx2", xcr0=0))
    assert "CPU" in _dispatch.veto("avx512", registers(*AVX, "avx2", xcr0=0xE7))


@pytest.mark.parametrize(
    ("flags", "runnable", "expected"),
    [
        pytest.param("fp asimd aes asimdhp asimddp sve", ("neon", "scalar"), "neon", id="Graviton"),
        pytest.param("", ("neon", "scalar"), "neon", id="Apple M"),
        pytest.param("half thumb neon vfpv4 idiva", ("scalar",), "scalar", id="ARMv7"),
        pytest.param(" ".join((*AVX, "avx2", *AVX512)), ("neon", "scalar"), "neon", id="emulated on x86"),
    ],
)
def test_arm(flags, runnable, expected):
    assert _dispatch.plan(flags.split(), runnable) == dict.fromkeys(_ops.NAMES, expected)


def test_plan_passes_over_losers_and_believes_measurements():
    flags = {*AVX, "avx2", *AVX512}
    slower = {("avx512", "softmax"): "some chip: 1.3 times", **{(isa, "top_k"): "" for isa in X86}}
    chosen = _dispatch.plan(flags, X86, slower, {"argmax": "scalar", "sample": "sse9", "scale": "neon"})
    expected = {"softmax": "avx2", "top_k": "scalar", "argmax": "scalar"}
    assert chosen == dict.fromkeys(_ops.NAMES, "avx512") | expected
    assert _dispatch.plan(flags, X86, slower, {"softmax": "avx512"})["softmax"] == "avx512"
    assert _dispatch.choose("softmax", X86, slower, {})[1] == "best usable; avx512 is slower: some chip: 1.3 times"


def test_losers_name_what_exists():
    names = {isa.name for isa in ISAS}
    assert all(isa in names and op in _ops.NAMES and why for (isa, op), why in _dispatch.SLOWER.items())


def test_plan_needs_flags_and_no_veto():
    assert _dispatch.plan({*AVX, "avx2"}, ("scalar",))["softmax"] == "scalar"
    assert _dispatch.plan((), X86)["softmax"] == "scalar"


# ---- this machine ----


def test_records_and_build_agree():
    assert _ops.compiled() == tuple(isa.name for isa in ISAS if isa.machine in (_ops.MACHINE, "any"))


def test_no_isa_of_another_machine_is_allowed():
    for isa in ISAS:
        if isa.machine not in (_ops.MACHINE, "any"):
            assert not _ops.allowed(isa.name), isa.name
    assert _ops.allowed("scalar")
    assert not _ops.allowed("sse9")
    if _ops.MACHINE == "x86_64":
        assert _ops.allowed("avx2") == _ops.x86_allows("avx2", **_ops.registers())
        assert _ops.allowed("avx512") >= _ops.x86_allows("avx512", **_ops.registers())  # tests may emulate it
    else:
        assert not any(_ops.registers().values())


def test_every_operation_is_bound():
    lanewise.softmax(LOGITS)
    assert set(_ops.bindings()) == set(_ops.NAMES)
    assert set(_ops.bindings().values()) <= set(_dispatch.runnable())


# ---- py-cpuinfo, well and ill ----


def fake_cpuinfo(monkeypatch, **parts):
    """Installs a py-cpuinfo of these parts. Returns the names of those that were asked."""
    asked: list[str] = []

    def recorded(name, part):
        return lambda: (asked.append(name), part())[1]

    forbidden = SimpleNamespace(**vars(CPUID) | {"is_selinux_enforcing": True})
    defaults = {"proc_cpuinfo": dict, "sysctl": dict, "CPUID": lambda: forbidden, "get_cpu_info": dict}
    package, module = ModuleType("cpuinfo"), ModuleType("cpuinfo.cpuinfo")
    for name, part in (defaults | parts).items():
        attribute = f"_get_cpu_info_from_{name}" if name in ("proc_cpuinfo", "sysctl") else name
        setattr(module, attribute, recorded(name, part))
    package.cpuinfo = module
    monkeypatch.setitem(sys.modules, "cpuinfo", package)
    monkeypatch.setitem(sys.modules, "cpuinfo.cpuinfo", module)
    return asked


def fail(*_):
    raise RuntimeError("no CPU today")


def as_x86(monkeypatch):
    monkeypatch.setattr(_ops, "MACHINE", "x86_64")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")


CPUID = SimpleNamespace(is_selinux_enforcing=False, get_max_extension_support=int, get_flags=lambda n: ["avx2", ""])
FLAGS = {"flags": ["avx2"]}


@pytest.mark.parametrize(
    ("parts", "asked", "source"),
    [
        ({"proc_cpuinfo": lambda: FLAGS}, 1, "/proc/cpuinfo"),
        ({"proc_cpuinfo": lambda: {"brand_raw": "A"}, "sysctl": lambda: FLAGS}, 2, "sysctl"),
        ({"sysctl": lambda: {"flags": [""]}, "CPUID": lambda: CPUID}, 3, "CPUID"),
        ({"proc_cpuinfo": fail, "sysctl": fail, "CPUID": fail, "get_cpu_info": lambda: FLAGS}, 4, "get_cpu_info()"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cheap_parts_are_asked_first(monkeypatch, parts, asked, source):
    as_x86(monkeypatch)
    order = fake_cpuinfo(monkeypatch, **parts)
    assert _cpu.detect() == ({"avx2"}, f"py-cpuinfo, {source}")
    assert order == ["proc_cpuinfo", "sysctl", "CPUID", "get_cpu_info"][:asked]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(dict.fromkeys(("proc_cpuinfo", "sysctl", "CPUID", "get_cpu_info"), fail), id="raising"),
        pytest.param({}, id="empty"),
        pytest.param({"get_cpu_info": lambda: {"arch": "X86_64"}}, id="no flags"),
        pytest.param({"proc_cpuinfo": lambda: {"flags": None}, "get_cpu_info": lambda: None}, id="None"),
        pytest.param({"get_cpu_info": sys.exit}, id="exiting"),
    ],
)
def test_c_stands_in(monkeypatch, parts):
    as_x86(monkeypatch)
    asked = fake_cpuinfo(monkeypatch, **parts)
    flags, source = _cpu.detect()
    assert (flags, source.split(" (")[0]) == (_cpu.c_flags(), "C, in place of py-cpuinfo")
    assert "get_cpu_info" in asked
    works()


def test_c_stands_in_for_one_that_hangs(monkeypatch):
    end = threading.Event()
    fake_cpuinfo(monkeypatch, proc_cpuinfo=end.wait)
    try:
        assert _cpu.detect(0.05) == (_cpu.c_flags(), "C, in place of py-cpuinfo (no answer in 0.05 s)")
        works()
    finally:
        end.set()


@pytest.mark.parametrize("block", ["cpuinfo", "cpuinfo.cpuinfo"])
def test_c_stands_in_for_one_that_is_absent(monkeypatch, block):
    fake_cpuinfo(monkeypatch)
    monkeypatch.delattr(sys.modules["cpuinfo"], "cpuinfo")
    monkeypatch.setitem(sys.modules, block, None)
    flags, source = _cpu.detect()
    assert flags == _cpu.c_flags()
    assert "Error: " in source
    works()


def test_c_stands_in_where_no_thread_starts(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert _cpu.detect() == (_cpu.c_flags(), "C, in place of py-cpuinfo (no CPU today)")
    works()


def test_frozen_starts_nothing_and_lacks_nothing(monkeypatch):
    """A frozen application saw fewer flags (DI09: workhorsy/py-cpuinfo#130)."""
    asked = fake_cpuinfo(monkeypatch, proc_cpuinfo=lambda: {"flags": ["sse2"]})
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert _cpu.detect()[0] == _cpu.c_flags()
    assert asked == []
    assert _dispatch.usable(_cpu.c_flags(), _dispatch.runnable()) == _dispatch.runnable()
    works()


@pytest.mark.parametrize(
    ("machine", "executable", "asked"),
    [
        ("x86_64", "/opt/blender/blender", ["proc_cpuinfo", "sysctl", "CPUID"]),
        ("aarch64", "/usr/bin/python3", ["proc_cpuinfo", "sysctl"]),
    ],
)
def test_no_program_is_started_that_is_no_python_or_cannot_help(monkeypatch, machine, executable, asked):
    order = fake_cpuinfo(monkeypatch)
    monkeypatch.setattr(_ops, "MACHINE", machine)
    monkeypatch.setattr(sys, "executable", executable)
    _cpu.detect()
    assert order == asked


PROC = {
    "ARMv6": ("Features\t: half thumb vfp edsp java tls\nCPU architecture: 7\nHardware\t: BCM2708\n", ("scalar",)),
    "ARMv7": ("processor\t: 0\nFeatures\t: half thumb neon vfpv4 idiva\nCPU part\t: 0xd03\n", ("scalar",)),
    "aarch64": ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd aes crc32 atomics\n", ("neon", "scalar")),
    "no features": ("processor\t: 0\nBogoMIPS\t: 50.00\n", ("neon", "scalar")),
    "missing": (None, ("neon", "scalar")),
}


@pytest.mark.parametrize("name", PROC)
def test_arm_proc_cpuinfo(monkeypatch, name):
    """py-cpuinfo's own parser on what ARM kernels write (DI11: workhorsy/py-cpuinfo#41)."""
    library = pytest.importorskip("cpuinfo.cpuinfo", exc_type=Exception, reason="py-cpuinfo does not know this CPU")
    text, runnable = PROC[name]
    monkeypatch.setattr(_ops, "MACHINE", "aarch64")
    monkeypatch.setattr(library.DataSource, "has_proc_cpuinfo", lambda: text is not None)
    monkeypatch.setattr(library.DataSource, "cat_proc_cpuinfo", lambda: (0, text))
    monkeypatch.setattr(library.DataSource, "has_sysctl", lambda: False)
    flags, source = _cpu.detect()
    if text and "Features" in text:
        listed = text.split("Features\t: ")[1].split("\n")[0]
        assert (flags, source) == (set(listed.split()), "py-cpuinfo, /proc/cpuinfo")
    else:
        assert flags == _cpu.c_flags()
    assert set(_dispatch.plan(flags, runnable).values()) == {runnable[0]}


# ---- the cache ----


def put(content: bytes) -> None:
    os.makedirs(_cpu.cache_folder(), exist_ok=True)
    with open(_cpu.cache_file(), "wb") as file:
        file.write(content)


def test_cache_answers_the_second_time(monkeypatch):
    asked = fake_cpuinfo(monkeypatch, proc_cpuinfo=lambda: FLAGS)
    first = _cpu.detect()
    _cpu.detect.cache_clear()
    assert _cpu.detect() == (first[0], f"cache of {first[1]}")
    assert asked == ["proc_cpuinfo"]
    assert os.listdir(_cpu.cache_folder()) == [os.path.basename(_cpu.cache_file())]


CORRUPT = [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"flags": 3}', b'{"flags": [1]}', b"[" * 100_000]


@pytest.mark.parametrize("content", CORRUPT, ids=lambda content: repr(content[:12]))
def test_corrupt_cache_is_replaced(monkeypatch, content):
    fake_cpuinfo(monkeypatch, proc_cpuinfo=lambda: FLAGS)
    put(content)
    assert _cpu.detect() == ({"avx2"}, "py-cpuinfo, /proc/cpuinfo")
    assert _cpu.recall()["flags"] == ["avx2"]


@pytest.mark.parametrize("tuned", [3, {"softmax": "sse9"}, {"softmax": ["scalar"]}, {"softmax": None}], ids=repr)
def test_strange_winners_are_ignored(tuned):
    put(json.dumps({"flags": sorted(_cpu.c_flags()), "tuned": tuned}).encode())
    works()


def test_cache_cannot_overrule_the_veto():
    put(json.dumps({"flags": sorted({*AVX, "avx2", *AVX512}), "tuned": dict.fromkeys(_ops.NAMES, "avx512")}).encode())
    works()


@pytest.mark.parametrize("change", ["signature", "version", "py-cpuinfo"])
def test_foreign_cache_is_not_read(monkeypatch, change):
    asked = fake_cpuinfo(monkeypatch, proc_cpuinfo=lambda: FLAGS)
    _cpu.detect()
    _cpu.detect.cache_clear()
    if change == "signature":
        monkeypatch.setattr(_ops, "cpu_signature", lambda: "0-0-0-0")
    elif change == "version":
        monkeypatch.setattr(lanewise, "__version__", "0.0.0")
    else:
        monkeypatch.setattr(_cpu, "cpuinfo_version", lambda: "py_cpuinfo-99")
    assert _cpu.detect()[1] == "py-cpuinfo, /proc/cpuinfo"
    assert len(asked) == 2


def test_unwritable_cache_costs_only_time(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LANEWISE_CACHE_DIR", str(tmp_path / "file" / "folder"))
    fake_cpuinfo(monkeypatch, proc_cpuinfo=lambda: FLAGS)
    assert _cpu.detect() == _cpu.detect() == ({"avx2"}, "py-cpuinfo, /proc/cpuinfo")


def test_failed_write_leaves_nothing_behind():
    os.makedirs(_cpu.cache_file())  # a folder, which a file cannot replace
    _cpu.remember(flags=["avx2"])
    assert os.listdir(_cpu.cache_folder()) == [os.path.basename(_cpu.cache_file())]
    assert _cpu.recall() == {}


def test_no_home_no_cache(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_cpu, "cache_folder", lambda: "~/.cache/lanewise")
    _cpu.remember(flags=["avx2"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("platform", "name", "variables", "expected"),
    [
        ("linux", "posix", {"XDG_CACHE_HOME": "/x"}, "/x/lanewise"),
        ("linux", "posix", {"HOME": "/home/u"}, "/home/u/.cache/lanewise"),
        ("darwin", "posix", {"HOME": "/Users/u"}, "/Users/u/Library/Caches/lanewise"),
        ("win32", "nt", {"LOCALAPPDATA": "/Local"}, "/Local/lanewise"),
        ("linux", "posix", {"XDG_CACHE_HOME": "/x", "LANEWISE_CACHE_DIR": "/y"}, "/y"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="the paths are written for POSIX")
def test_cache_folder(monkeypatch, platform, name, variables, expected):
    with monkeypatch.context() as patch:
        for variable in ("XDG_CACHE_HOME", "LANEWISE_CACHE_DIR", "LOCALAPPDATA"):
            patch.delenv(variable, raising=False)
        for variable, value in variables.items():
            patch.setenv(variable, value)
        patch.setattr(sys, "platform", platform)
        patch.setattr(os, "name", name)
        assert _cpu.cache_folder() == expected


def test_version_of_cpuinfo_without_its_import():
    assert _cpu.cpuinfo_version() == f"py_cpuinfo-{importlib.metadata.version('py-cpuinfo')}"


# ---- the override ----

needs_vectors = pytest.mark.skipif(len(_dispatch.runnable()) == 1, reason="scalar is all that runs here")
BAD = [(name, ValueError) for name in ("FOO", "Scalar", "AVX2", " scalar")]
BAD += [(isa.name, RuntimeError) for isa in ISAS if isa.name not in _dispatch.runnable()]


@pytest.mark.parametrize("isa", _dispatch.runnable())
def test_environment_forces(monkeypatch, isa):
    monkeypatch.setenv("LANEWISE_ISA", isa)
    asked = fake_cpuinfo(monkeypatch)
    lanewise.softmax(LOGITS)
    _dispatch.resolve()
    assert asked == []
    info = lanewise.info()
    assert info["environment"] == isa
    assert info["operations"] == {op: {"isa": isa, "why": "LANEWISE_ISA"} for op in _ops.NAMES}


@pytest.mark.parametrize("name", ["", "auto"])
def test_environment_may_say_nothing(monkeypatch, name):
    monkeypatch.setenv("LANEWISE_ISA", name)
    works()


@pytest.mark.parametrize(("name", "error"), BAD)
def test_environment_never_downgrades(monkeypatch, name, error):
    """DI07, numpy/numpy#16395: no effect without a trace."""
    monkeypatch.setenv("LANEWISE_ISA", name)
    for call in (_dispatch.resolve, lanewise.info, lambda: lanewise.use(None), lambda: lanewise.use("scalar", "copy")):
        with pytest.raises(error, match="LANEWISE_ISA: .*" + name) as caught:
            call()
        assert all(isa in str(caught.value) for isa in _dispatch.runnable())
    lanewise.use("scalar")
    assert set(_ops.bindings().values()) == {"scalar"}


@pytest.mark.parametrize(("name", "error"), BAD)
def test_use_never_downgrades(name, error):
    lanewise.use("scalar")
    for call in (lambda: lanewise.use(name), lambda: lanewise.using(name).__enter__()):
        with pytest.raises(error, match=r"use\(\): .*" + name + ".* here"):
            call()
    assert set(_ops.bindings().values()) == {"scalar"}


@pytest.mark.parametrize("auto", [None, "auto"])
def test_use_and_back(auto):
    works()
    planned = _ops.bindings()
    lanewise.use("scalar")
    assert set(_ops.bindings().values()) == {"scalar"}
    lanewise.use(auto)
    assert _ops.bindings() == planned


def test_auto_goes_back_to_the_environment(monkeypatch):
    monkeypatch.setenv("LANEWISE_ISA", "scalar")
    lanewise.use(_dispatch.runnable()[0])
    lanewise.use("auto")
    assert set(_ops.bindings().values()) == {"scalar"}


def test_use_of_one_operation():
    works()
    planned = _ops.bindings()
    lanewise.use("scalar", "softmax")
    assert _ops.bindings() == planned | {"softmax": "scalar"}
    assert lanewise.info()["operations"]["softmax"] == {"isa": "scalar", "why": "use()"}
    lanewise.use("scalar", "top_k")
    lanewise.use("auto", "softmax")
    assert _ops.bindings() == planned | {"top_k": "scalar"}
    with pytest.raises(ValueError, match=r"operation must be one of softmax, .*, got 'softmin'"):
        lanewise.use("scalar", "softmin")


@needs_vectors
def test_using_nests_and_restores():
    best = _dispatch.runnable()[0]
    lanewise.use("scalar", "top_k")
    outside = _ops.bindings()
    with pytest.raises(KeyError), lanewise.using("scalar"):
        with lanewise.using(best, "softmax"):
            assert _ops.bindings() == dict.fromkeys(_ops.NAMES, "scalar") | {"softmax": best}
            with lanewise.using("auto"):
                assert set(_ops.bindings().values()) == {best}
            assert _ops.bindings()["scale"] == "scalar"
        assert set(_ops.bindings().values()) == {"scalar"}
        raise KeyError
    assert _ops.bindings() == outside
    assert outside["top_k"] == "scalar"


# ---- info ----


def test_info_is_true(monkeypatch):
    """Detected, compiled, usable and used are four things (DI03: leejet/stable-diffusion.cpp#1343)."""
    fake_cpuinfo(monkeypatch, proc_cpuinfo=lambda: {"flags": sorted(_cpu.c_flags() - {"f16c"})})
    info = lanewise.info()
    assert json.loads(json.dumps(info))["operations"] == info["operations"]
    assert {op: row["isa"] for op, row in info["operations"].items()} == _ops.bindings()
    assert info["compiled"] == _ops.compiled()
    assert info["flags"] == sorted(_cpu.c_flags() - {"f16c"})
    assert {*info["usable"], *info["unusable"]} == {isa.name for isa in ISAS}
    assert info["operations"]["softmax"] == {"isa": info["usable"][0], "why": "best usable"}
    for isa, reason in info["unusable"].items():
        if isa not in _ops.compiled():
            assert reason.startswith("not compiled in: ")
        elif not _ops.allowed(isa):
            assert reason.startswith("vetoed by C: ")
        else:
            assert reason == "not listed by py-cpuinfo: f16c"
    assert os.path.isfile(info["cache"])


def test_use_reaches_what_py_cpuinfo_does_not_list(monkeypatch):
    fake_cpuinfo(monkeypatch, proc_cpuinfo=lambda: {"flags": ["fpu"]})
    best = _dispatch.runnable()[0]
    lanewise.use(best)
    assert set(_ops.bindings().values()) == {best}


# ---- tune ----


def test_tune_keeps_winners(monkeypatch):
    usable = _dispatch.runnable()
    _cpu.remember(flags=sorted(_cpu.c_flags()))

    def time_all(op, size, names, seconds):
        return {isa: [100.0 if (op, isa) == ("top_k", names[-1]) else 200.0] * 5 for isa in names}

    monkeypatch.setattr(_tune, "time_all", time_all)
    table = {row["operation"]: row for row in lanewise.tune()}
    assert table["top_k"]["isa"] == usable[-1]
    assert table["top_k"]["microseconds"][usable[-1]] == {32000: 0.1, 128256: 0.1}
    assert table["softmax"]["isa"] == table["softmax"]["untuned"] == usable[0]
    assert _ops.bindings() == dict.fromkeys(_ops.NAMES, usable[0]) | {"top_k": usable[-1]}
    assert _cpu.recall()["flags"] == sorted(_cpu.c_flags())
    _dispatch._start = None  # as another process would find it
    assert lanewise.info()["operations"]["top_k"] == {"isa": usable[-1], "why": "measured here by lanewise.tune()"}


def test_tune_measures_what_users_call(monkeypatch):
    monkeypatch.setattr(_tune, "SIZES", (400, 500))
    monkeypatch.setattr(_tune, "SAMPLE_NS", 1000)
    before = _ops.bindings()
    table = lanewise.tune(seconds=0.0)
    assert [row["operation"] for row in table] == [op for op in _ops.NAMES if _ops.GROUPS[op] == "sampling"]
    for row in table:
        assert set(row["microseconds"]) == set(_dispatch.usable(_cpu.detect()[0], _dispatch.runnable()))
        assert all(time > 0 for times in row["microseconds"].values() for time in times.values())
    assert _ops.bindings() == before | {row["operation"]: row["isa"] for row in table}


def test_tune_switches_only_for_a_clear_win_at_every_size():
    names = ("avx512", "avx2", "scalar")

    def fastest(*avx2: float) -> str:
        noise = np.array([1.0, 3.0, 1.0, 0.5])
        times = {n: {"avx512": 100 * noise, "avx2": us * noise, "scalar": 900 * noise} for n, us in enumerate(avx2)}
        return _tune.fastest("avx512", names, times)

    assert fastest(90.0, 90.0) == "avx2"
    assert fastest(97.0, 97.0) == "avx512"
    assert fastest(50.0, 97.0) == "avx512"


# ---- whole processes ----


def python(code: str, **environment: str) -> str:
    """What a new Python prints that runs `code`."""
    try:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        pytest.skip("this Python runs under an emulator that cannot start it again")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cache_hit_starts_and_imports_nothing():
    got = python("""
        import sys, numpy
        started = []
        sys.addaudithook(lambda event, args: event in
                         ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.system", "os.exec", "os.spawn")
                         and started.append(event))
        before = set(sys.modules)
        import lanewise
        slow = {"cpuinfo", "json", "platform", "multiprocessing", "subprocess", "importlib.metadata", "ctypes"}
        slow |= {"lanewise." + name for name in ("steps", "sampler", "kvcache", "saving", "beams", "offload")}
        assert not slow & (set(sys.modules) - before), slow & (set(sys.modules) - before)
        from lanewise import _cpu, _ops
        assert not any(_ops.bindings().values())
        _cpu.remember(flags=sorted(_cpu.c_flags()), flags_from="a test")
        lanewise.softmax(numpy.zeros(5, numpy.float32))
        assert not (slow - {"json"}) & (set(sys.modules) - before)
        print(lanewise.info()["flags_from"], started)
    """)
    assert got == "cache of a test []"


def test_what_is_imported_later_is_there():
    got = python("""
        import lanewise
        assert {"Sampler", "steps", "PagedKVCache"} <= set(dir(lanewise))
        assert all(getattr(lanewise, name) is not None for name in lanewise.__all__)
        print(lanewise.steps.TopK(5), lanewise.Sampler.__name__, hasattr(lanewise, "nothing"))
    """)
    assert got == "TopK(k=5, min_keep=1, ties='lowest') Sampler False"


def test_first_operation_of_a_real_process():
    """py-cpuinfo as it is, asked from many threads at once that also change what is in use."""
    got = python("""
        import threading, numpy, lanewise
        start, results = threading.Barrier(8), set()
        def work():
            start.wait()
            for isa in ("scalar", "auto") * 20:
                results.add(lanewise.softmax(numpy.arange(99, dtype=numpy.float32)).tobytes())
                lanewise.use(isa)
        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        print(len(results), lanewise.info()["flags_from"])
    """)
    assert got.startswith(("1 py-cpuinfo, ", "1 C, in place"))


def test_forced_process():
    """LANEWISE_ISA never keeps the package from its import, and neither needs nor asks py-cpuinfo."""
    code = """
        import os, sys, numpy, lanewise
        for _ in range(2):
            try:
                lanewise.softmax(numpy.zeros(5, numpy.float32))
            except ValueError as error:
                print(error)
            os.environ["LANEWISE_ISA"] = "scalar"
        print(set(lanewise._ops.bindings().values()), "cpuinfo" in sys.modules)
    """
    bad, good = python(code, LANEWISE_ISA="avx1024").splitlines()
    assert bad.startswith("LANEWISE_ISA: no instruction set is called 'avx1024'; available here: ")
    assert good == "{'scalar'} False"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_also_in_the_middle_of_the_choice():
    got = python("""
        import os, threading, numpy, lanewise
        from lanewise import _dispatch
        held, end = threading.Event(), threading.Event()
        def hold():
            with _dispatch._lock:
                held.set()
                end.wait()
        def child():
            pid = os.fork()
            if not pid:
                threading.Timer(20, os._exit, [1]).start()  # a child that waits for ever
                lanewise.sample(numpy.zeros(50, numpy.float32), seed=1, step=0)
                lanewise.use("scalar")
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        first = child()
        end.set()
        thread.join()
        lanewise.softmax(numpy.zeros(5, numpy.float32))
        print(first, child())
    """)
    assert got == "0 0"

"""Builds the extension modules. Everything else about the package is in pyproject.toml.

Each csrc/isa_*.c turns on its own instruction set by pragma and is empty on other machines, so one list of
sources and one set of flags serve every target, cross-compilation included.
"""

import glob
import os
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

# The arithmetic is pinned: no contraction, no libm error paths, never -ffast-math (docs/determinism.md).
COMPILE_ARGS = Path("csrc/flags.txt").read_text(encoding="ascii").split()
WRAPPER_ARGS = ["-O2"]  # smaller by a seventh than -O3, and calls take as long (Zen 3, gcc 12, 2026-11-30)
# Wrappers whose work outweighs the call: smaller by a third. By it the others take longer: calls of attention, filters,
# moves and transfer a twentieth, what every small call passes through a tenth (Zen 4, gcc 12, 2026-11-30).
SMALL_ARGS = ["-Os"]
SMALL = ["_sides", "chain", "decoding", "drawing", "stream"]
LINK_ARGS = []
if not os.environ.get("LANEWISE_DEBUG"):
    COMPILE_ARGS.append("-g0")  # Python's own flags ask for -g, which takes as long again
    LINK_ARGS += ["-Wl,-s"] if sys.platform == "linux" else []


# What belongs to one module alone; every other C file is linked into _ops.
OWN = {"pool": ["csrc/pool.c", "csrc/prefix.c"], "sampler": ["csrc/history.c"]}


def sources_of(name):
    rest = set(glob.glob("csrc/*.c")).difference(*OWN.values())
    return sorted(rest) if name == "_ops" else OWN.get(name, [])


def compile_args(name):
    if name in ("_ops", "pool"):
        return COMPILE_ARGS
    return COMPILE_ARGS + (SMALL_ARGS if name in SMALL else WRAPPER_ARGS)


def extension(name):
    sources = sources_of(name)
    return Extension(
        f"lanewise.{name}",
        [f"pkg/lanewise/{name}.pyx", *sources],
        depends=glob.glob("csrc/**/*.*" if sources else "csrc/*.*", recursive=True),  # wrappers include no kernel
        include_dirs=["csrc", numpy.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
        extra_compile_args=compile_args(name),
        extra_link_args=LINK_ARGS,
    )


setup(
    ext_modules=cythonize(
        [extension(Path(module).stem) for module in sorted(glob.glob("pkg/lanewise/*.pyx"))],
        include_path=["pkg"],
        build_dir="build/cython",
        language_level=3,
    ),
    options={"build_ext": {"parallel": True}},
)

"""The package that a module of this folder stands in for."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


def need(module: str, *, package: str, works: str, names: tuple[str, ...] = ()) -> ModuleType:
    """The imported `module`, which must have `names`; else ImportError says which versions of `package` work.

    >>> need("json", package="python", works="3.10 and later", names=("loads",)).__name__
    'json'
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and lacks something of its own
        raise ImportError(f"{package} {works} is needed: {_there(package)}") from error
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise ImportError(f"{package} {works} is needed for {module}.{missing[0]}: {_there(package)}")
    return found


def _there(package: str) -> str:
    try:
        return f"{version(package)} is installed"
    except PackageNotFoundError:
        return "it is not installed"

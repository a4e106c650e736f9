"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lanewise
from lanewise import _dispatch

import compiled

COMPILED = ("test_build", "test_replay")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for a compiler comes last."""
    items.sort(key=waits_for_compiler)


def waits_for_compiler(item: pytest.Item) -> bool:
    return item.path.stem in COMPILED


@pytest.fixture(scope="session", autouse=True)
def compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """It works beside the other tests."""
    if compiled.obstacle() or not any(map(waits_for_compiler, request.session.items)):
        yield
        return
    with compiled.making() as process:
        yield
        process.terminate()


@pytest.fixture(params=_dispatch.runnable())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once on every ISA that this machine can run."""
    with lanewise.using(request.param):
        yield request.param

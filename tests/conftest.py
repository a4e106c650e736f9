"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lanewise
from lanewise import _dispatch


@pytest.fixture(params=_dispatch.runnable())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once on every ISA that this machine can run."""
    with lanewise.using(request.param):
        yield request.param

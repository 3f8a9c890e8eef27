"""Tests of kernels make their tensors where the kernels run."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    from group import DEVICE  # not before tests/conftest.py has said where kernels run

    with DEVICE:
        yield

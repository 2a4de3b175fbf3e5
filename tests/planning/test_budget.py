"""Budgets written as text."""

import pytest

from torchremat.planning.budget import Budget


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1.5KiB", 1536), (" 2 MB ", 2_000_000), ("7B", 7), (".5kB", 500)]
)
def test_budgets_as_text(text, nbytes):
    assert Budget.of(text).nbytes == nbytes

"""Budgets written as text."""

import click
import pytest
import torch

import torchremat as tr
from torchremat.checkpoint_policies import memory_budget
from torchremat.cli.arguments.read_policies import check_budget
from torchremat.errors import BudgetSpellingError
from torchremat.planning.budget import Budget


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1.5KiB", 1536), (" 2 MB ", 2**21), ("7B", 7), (".5kB", 512), ("8GiB", 2**33),
        ("8GB", 2**33), ("8G", 2**33), ("8gib", 2**33), ("8g", 2**33), ("1tb", 2**40),
    ],
)  # fmt: skip
def test_budgets_in_bytes(text, nbytes):
    assert Budget.of(text) == Budget(nbytes=nbytes)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("50 %", Budget(fraction=0.5)),
        (" Least ", Budget(is_least=True)),
        ("time:+10%", Budget(added=0.1)),
        ("TIME: + 12.5 %", Budget(added=0.125)),
        ("time:+0%", Budget(added=0.0)),
    ],
)
def test_budgets_that_depend_on_the_step(text, budget):
    assert Budget.of(text) == budget
    assert budget.is_relative


MISSPELT = [
    ("8", r"'8' is not a budget: it has no unit: write '8GiB', or '8B' if bytes are meant"),
    ("8Gi", r"'Gi' is not a unit, nearest: 'GiB'"),
    ("8GiBs", r"'GiBs' is not a unit, nearest: 'GiB'"),
    ("leest", r"it is not a number with a unit; nearest: 'least'"),
    ("times:+10%", r"it is not a number with a unit; nearest: 'time'"),
    ("time:10%", r"write 'time:\+10%' for 10 % more time"),
    ("time:+10", r"write 'time:\+10%' for 10 % more time"),
    ("time:-5%", r"no recomputation takes less time than none: write 'time:\+0%'"),
    ("time:", r"after 'time:' comes how much more, as in 'time:\+10%'"),
    ("8,5GiB", r"it is not a number with a unit"),
    ("-1GiB", r"a budget is positive"),
    ("150%", r"a fraction of the peak without rematerialisation is in \(0, 1\]"),
]


@pytest.mark.parametrize(("text", "match"), MISSPELT)
def test_near_misses_are_named_at_every_entrance(text, match):
    model, x = torch.nn.Linear(2, 2), torch.ones(2, 2)
    entrances = [
        lambda: memory_budget(text),
        lambda: tr.plan(model, x, budget=text),
        lambda: tr.nn.wrap(model, f"budget:{text}"),
        lambda: tr.policy(f"budget:{text}"),
    ]
    for enter in entrances:
        # a comma ends an item of a policy's list, and what is left has its own error
        with pytest.raises((BudgetSpellingError, TypeError)) as caught:
            enter()
        if "," not in text:
            assert caught.match(match)
    with pytest.raises(click.BadParameter, match=match):
        check_budget(text)

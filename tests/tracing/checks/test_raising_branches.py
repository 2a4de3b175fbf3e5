"""The code of a function tells which truth value lets it go on, where the other way raises."""

from typing import ClassVar

import pytest
import torch

from torchremat.tracing.checks.raising_branches import find_needed_truth


class Asks(torch.Tensor):
    """A tensor of which each question for its truth notes what the code that asks needs."""

    needed: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__bool__, torch.Tensor.item):
            cls.needed.append(find_needed_truth())
            return cls.needed[-1] is not False
        return super().__torch_function__(func, types, args, kwargs or {})


def needs_true(x):
    if not x.all():
        raise ValueError("no")


def needs_false(x):
    if x.any():
        message = f"there are {[1 for _ in range(3)]}"
        raise ValueError(message)
    return x


def asserts(x):
    assert x.all(), "no"


def raises_if_not_not(x):
    if not (not x.any()):  # noqa: SIM208 (the code is what is tested)
        raise ValueError


def raises_else(x, y=1):
    if y > 0 and x.all():
        y += 1
    else:
        raise RuntimeError
    return y


def item(x):
    if not x.all().item():
        raise ValueError


def as_bool(x):
    if bool(x.any()):
        raise ValueError


def in_a_loop(x):
    for _ in range(2):
        if x.any():
            raise ValueError


def returns_condition(x):
    valid = x > 0
    if not valid.all():
        return valid
    return x < 5


def after_a_number(x, y=1):
    if y > 2 or not x.all():
        raise ValueError


def _all_of(x):
    return bool(x.all())


def _not_all_of(x):
    return not _all_of(x)


def asks_a_helper(x):
    if not _all_of(x):
        raise ValueError


def asks_a_helper_of_a_helper(x):
    if _not_all_of(x):
        raise ValueError


RECOGNISED = [
    (needs_true, True), (needs_false, False), (asserts, True), (raises_if_not_not, False),
    (raises_else, True), (item, True), (as_bool, False), (in_a_loop, False),
    (returns_condition, True), (after_a_number, True), (asks_a_helper, True),
    (asks_a_helper_of_a_helper, True),
]  # fmt: skip


def branches(x):
    return 1 if x.all() else 2


def both_raise(x):
    if x.all():
        raise ValueError
    raise TypeError


def one_way_may_return(x, y=1):
    if x.all():
        if y > 2:
            raise ValueError
        return 1
    return 2


def stores(x):
    y = bool(x.all())
    if not y:
        raise ValueError


def returns_another(x):
    if not x.all():
        return x + 1
    return x


def returns_if_any(x):
    if not x.any():
        return x
    return x + 1


def loops(x):
    while not x.all():
        x = x + 1


def _pair_of(x):
    return bool(x.all()), 1


def asks_for_a_pair(x):
    if not _pair_of(x):
        raise ValueError


def _any_of(x):
    return any([x.all()])


def asks_any(x):
    if not _any_of(x):
        raise ValueError


OTHERS = [
    branches, both_raise, one_way_may_return, stores, returns_another, returns_if_any, loops,
    asks_for_a_pair, asks_any,
]  # fmt: skip


@pytest.fixture
def mask():
    Asks.needed = []
    return torch.ones(3).as_subclass(Asks)


@pytest.mark.parametrize(
    ("function", "needed"), RECOGNISED, ids=lambda v: getattr(v, "__name__", v)
)
def test_one_way_only_raises(mask, function, needed):
    function(mask)
    assert set(Asks.needed) == {needed}


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_other_branches_are_left_alone(mask, function):
    try:
        function(mask)
    except ValueError:
        assert function is both_raise
    assert set(Asks.needed) == {None}


def test_a_helper_that_python_has_specialised(mask):
    for _ in range(100):  # Python 3.11 then runs `bool` at another instruction
        _all_of(torch.ones(3))
    asks_a_helper(mask)
    assert set(Asks.needed) == {True}

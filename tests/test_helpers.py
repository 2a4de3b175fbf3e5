"""The helpers of the tests fail where they should."""

import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers import (
    Choosing,
    OpCounter,
    RandomPolicy,
    assert_freed,
    assert_same,
    derivatives,
    differences,
    grad_counts,
    nothing_left_behind,
)


def test_counter_counts_by_name():
    with OpCounter() as counter:
        torch.sin(torch.sin(torch.ones(2))) + 1
    assert counter["sin"] == counter["aten.sin"] == 2
    assert counter.only("add", "cos") == {"add": 1, "cos": 0}


def test_counts_forward_and_backward_apart():
    x = torch.ones(3, requires_grad=True)
    assert grad_counts(lambda: x.sin().sin(), x, "sin") == (2, 0)
    assert grad_counts(lambda: x.sin().cos(), x, "sin", "cos") == (
        {"sin": 1, "cos": 1},
        {"sin": 1, "cos": 1},
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor(1.0), torch.tensor(1.0 + 2**-23)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.double)),
        (torch.ones(2), torch.ones(1, 2)),
        ([torch.ones(2)], (torch.ones(2),)),
        ({"a": 1}, {"a": 1.0}),
        ({"a": torch.ones(1)}, {"a": None}),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
        (torch.tensor([1 + 1j]).conj(), torch.tensor([1 + 1j])),
    ],
)
def test_a_difference_is_found(a, b):
    assert differences(a, a) == differences(b, b) == []
    assert differences(a, b) != []
    with pytest.raises(AssertionError, match="here"):
        assert_same(a, b, "here")


def test_same_bits_in_another_layout_are_the_same():
    x = torch.randn(3, 4)
    assert_same(
        {"x": [x, torch.tensor(float("nan"))]},
        {"x": [x.t().contiguous().t(), x[0, 0] * float("nan")]},
    )


def test_close_allows_rounding_and_no_more():
    x = torch.ones(2, dtype=torch.double)
    assert_same(x, x + 1e-14, close=True)
    with pytest.raises(AssertionError):
        assert_same(x, x + 1e-9, close=True)


def test_derivatives_go_to_the_order_asked():
    x = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    found = derivatives(lambda x: x**3, (x,), (x,), order=3)
    weight = torch.randn((), generator=torch.Generator().manual_seed(0), dtype=torch.double)
    expected = {
        "value": x.detach() ** 3,
        "requires_grad": [True],
        "derivative 1": (12 * weight,),
        "derivative 1, create_graph": [12 * weight],
        "derivative 2": (12 * weight**2,),
        "derivative 2, create_graph": [12 * weight**2],
        "derivative 3": (6 * weight**3,),
    }
    assert_same(found, expected, close=True)
    assert list(derivatives(lambda x: x.detach(), (x,), (x,))) == ["value", "requires_grad"]


def test_policies_of_tests():
    assert [Choosing([True, False])(None) for _ in range(2)] == [True, True]
    choosing = Choosing([True, False])
    assert [choosing(None) for _ in range(3)] == [True, False, True]
    policy = RandomPolicy(0)
    assert {policy(None) for _ in range(99)} == {True, False}


def test_living_objects_are_found():
    tensor = torch.ones(1)
    with pytest.raises(AssertionError, match="still alive"):
        assert_freed(weakref.ref(tensor))
    reference = weakref.ref(tensor)
    del tensor
    assert_freed(reference)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_leftovers_are_found():
    mode = _Mode()
    with pytest.raises(AssertionError, match="function modes"), nothing_left_behind():
        mode.__enter__()
    mode.__exit__(None, None, None)
    counter = OpCounter()
    with pytest.raises(AssertionError, match="dispatch modes"), nothing_left_behind():
        counter.__enter__()
    counter.__exit__(None, None, None)
    with pytest.raises(AssertionError, match="grad mode"), nothing_left_behind():
        torch._C._set_grad_enabled(False)
    torch.set_grad_enabled(True)
    with nothing_left_behind():
        torch.ones(1) + 1

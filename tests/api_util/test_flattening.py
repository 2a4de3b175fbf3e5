"""Functions of trees as functions of leaves: structures go round, and are checked."""

import pytest
from torch.utils import _pytree

from torchremat import api_util


def structure(tree):
    return _pytree.tree_structure(tree)


def test_flat_functions_compute_what_the_function_of_trees_does():
    args, kwargs = ({"a": 1, "b": [2, 3]}, 4), {"k": (5, None)}
    leaves, in_tree = _pytree.tree_flatten((args, kwargs))

    def fun(d, x, *, k):
        return [d["b"], {"x": x, "k": k}]

    flat_fun, out_tree_thunk = api_util.flatten_fun(fun, in_tree)
    assert flat_fun(*leaves) == [2, 3, 4, 5, None]
    assert out_tree_thunk() == structure(fun(*args, **kwargs))
    assert _pytree.tree_unflatten(flat_fun(*leaves), out_tree_thunk()) == fun(*args, **kwargs)


def test_without_keywords_the_structure_is_that_of_the_arguments():
    leaves, in_tree = _pytree.tree_flatten(((1, 2), 3))
    flat_fun, out_tree_thunk = api_util.flatten_fun_nokwargs(lambda p, x: {"r": (x, *p)}, in_tree)
    assert flat_fun(*leaves) == [3, 1, 2]
    assert out_tree_thunk() == structure({"r": (0, 0, 0)})


def test_the_structure_of_the_result_is_unknown_before_the_function_has_run():
    _, out_tree_thunk = api_util.flatten_fun(lambda x: x, structure(((0,), {})))
    with pytest.raises(RuntimeError, match="the flat function has not run"):
        out_tree_thunk()


def test_flat_functions_apply_to_trees():
    io_tree = (structure((({"a": 0, "b": 0}, 0), {})), structure([(0, 0)]))
    swapped = api_util.apply_flat_fun(lambda a, b, c: [b + c, a], io_tree, {"a": 1, "b": 2}, 3)
    assert swapped == [(5, 1)]
    io_tree = (structure((0, 0)), structure((0,)))
    assert api_util.apply_flat_fun_nokwargs(lambda a, b: [a - b], io_tree, (5, 3)) == (2,)


@pytest.mark.parametrize("args", [((1, 2),), ([1, 2], 3), ([1],)])
def test_arguments_of_another_structure_are_refused(args):
    io_tree = (structure((([0, 0],), {})), structure(0))
    with pytest.raises(TypeError, match=r"(?s)^Expected TreeSpec.*, got TreeSpec"):
        api_util.apply_flat_fun(lambda a, b: [a + b], io_tree, *args)

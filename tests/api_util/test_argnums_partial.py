"""Functions with bound arguments: they compute the same, and are keys by value and type."""

import pytest

from torchremat import api_util


def listed(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize("dyn_argnums", [0, (0,), (1,), (0, 2), (2, 0), (-1,), (), [1, -3]])
def test_the_function_of_the_others_computes_the_same(dyn_argnums):
    args = ("a", "b", "c")
    partial, others = api_util.argnums_partial(listed, dyn_argnums, args)
    numbers = [dyn_argnums] if isinstance(dyn_argnums, int) else dyn_argnums
    assert others == tuple(args[i] for i in numbers)
    assert partial(*others, k=1) == (args, {"k": 1})


def test_partials_are_keys_by_the_value_and_type_of_what_is_bound():
    def bound(value):
        return api_util.argnums_partial(listed, 0, ("x", value))[0]

    cache = {bound(1): "one"}
    assert cache[bound(1)] == "one"
    assert bound(1.0) not in cache
    assert bound(True) not in cache
    assert bound(2) not in cache


@pytest.mark.parametrize("number", [3, -4])
def test_positions_are_checked_in_the_words_of_jax(number):
    rule = (
        "Positional argument indices, e.g. for `static_argnums`, must have value greater than or "
        rf"equal to -len\(args\) and less than len\(args\), but got value {number} "
        r"for len\(args\) == 3"
    )
    with pytest.raises(ValueError, match=rule):
        api_util.argnums_partial(listed, number, (1, 2, 3))


def test_an_argument_may_not_be_named_twice():
    with pytest.raises(ValueError, match="name an argument twice"):
        api_util.argnums_partial(listed, (0, -2), (1, 2))


def test_the_wrong_number_of_others_is_an_error():
    partial, _ = api_util.argnums_partial(listed, 0, (1, 2))
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        partial(1, 2)


def test_what_cannot_be_hashed_is_bound_only_on_request():
    with pytest.raises(
        ValueError, match=r"Non-hashable static arguments.*index 1.*'list'.*for function listed"
    ):
        api_util.argnums_partial(listed, 0, ("x", [1]))
    partial, _ = api_util.argnums_partial(listed, 0, ("x", [1]), require_static_args_hashable=False)
    assert partial("x") == (("x", [1]), {})

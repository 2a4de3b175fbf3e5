"""How often operators run again: the examples of JAX's documentation and tests, to the number.

Each count is of operators that really run, forward and backward, after the trace.
"""

import functools

import pytest
import torch

import torchremat as tr
from tests.helpers import OpCounter, grad_counts

cp = tr.checkpoint_policies
D = torch.double


def leaf(*shape):
    return torch.ones(shape, dtype=D, requires_grad=True)


def counts(fun, args, *names):
    """Counts of a steady-state call: the first one traces."""
    wrt = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    torch.autograd.grad(fun(*args).sum(), wrt)
    return grad_counts(lambda: fun(*args), wrt, *names)


# --- the tutorial of jax.checkpoint: three layers sin(W @ x) -------------------------------------


def g(w, x):
    return torch.sin(w @ x)


def three_layers(layer, w1, w2, w3, x):
    return layer(w3, layer(w2, layer(w1, x)))


LAYERS = (leaf(5, 4), leaf(6, 5), leaf(7, 6), leaf(4, 3))


def test_plain_layers():
    fun = functools.partial(three_layers, g)
    assert counts(fun, LAYERS, "mm", "sin", "cos") == (
        {"mm": 3, "sin": 3, "cos": 0},
        {"mm": 6, "sin": 0, "cos": 3},
    )


def test_each_layer_under_checkpoint():
    """A layer's own output is the next one's input: its sine does not run again."""
    fun = functools.partial(three_layers, tr.checkpoint(g))
    assert counts(fun, LAYERS, "mm", "sin", "cos") == (
        {"mm": 3, "sin": 3, "cos": 0},
        {"mm": 3 + 6, "sin": 0, "cos": 3},
    )


def test_all_layers_under_one_checkpoint():
    fun = tr.checkpoint(functools.partial(three_layers, g))
    assert counts(fun, LAYERS, "mm", "sin", "cos") == (
        {"mm": 3, "sin": 3, "cos": 0},
        {"mm": 3 + 6, "sin": 2, "cos": 3},
    )


@pytest.mark.parametrize(
    "policy", ["dots", cp.dots_with_no_batch_dims_saveable, cp.checkpoint_dots]
)
def test_all_layers_with_their_products_saved(policy):
    fun = tr.checkpoint(functools.partial(three_layers, g), policy=policy)
    assert counts(fun, LAYERS, "mm", "sin", "cos") == (
        {"mm": 3, "sin": 3, "cos": 0},
        {"mm": 6, "sin": 2, "cos": 3},
    )


def named(w1, w2, w3, x):
    x = tr.checkpoint_name(g(w1, x), "a")
    x = tr.checkpoint_name(g(w2, x), "b")
    return tr.checkpoint_name(g(w3, x), "c")


@pytest.mark.parametrize(
    ("policy", "mm", "sin"),
    [
        (cp.save_only_these_names("a"), 9, 1),
        (cp.save_only_these_names("a", "b"), 9, 0),
        (cp.save_any_names_but_these("a"), 9, 1),
        (cp.save_anything_except_these_names("a", "b"), 6, 2),
        (cp.save_anything_except_these_names("c"), 6, 0),
        (cp.everything_saveable, 6, 0),
        (cp.nothing_saveable, 9, 2),
        (cp.save_only_these_names("a") | cp.dots_saveable, 6, 1),
        (cp.save_from_both_policies(cp.save_only_these_names("a", "b"), cp.dots_saveable), 6, 0),
        (cp.save_only_these_names("a", "b") & cp.dots_saveable, 9, 2),
    ],
    ids=str,
)
def test_named_layers(policy, mm, sin):
    """The product that is the argument of a cosine runs again unless it is saved."""
    assert counts(tr.checkpoint(named, policy=policy), LAYERS, "mm", "sin", "cos") == (
        {"mm": 3, "sin": 3, "cos": 0},
        {"mm": mm, "sin": sin, "cos": 3},
    )


# --- chains of sines: the recursion of the tutorial ----------------------------------------------


def chain(functions):
    def composed(x):
        for fun in functions:
            x = fun(x)
        return x

    return composed


def recursive_checkpoint(functions):
    if len(functions) == 1:
        return functions[0]
    if len(functions) == 2:
        return chain(functions)
    half = len(functions) // 2
    first, second = (recursive_checkpoint(f) for f in (functions[:half], functions[half:]))
    return chain([tr.checkpoint(first), second])


SINE_COUNTS = {
    "plain": (chain([torch.sin] * 8), 0),
    "one checkpoint": (tr.checkpoint(chain([torch.sin] * 8)), 7),
    "two halves": (chain([tr.checkpoint(chain([torch.sin] * 4))] * 2), 6),
    "recursive": (recursive_checkpoint([torch.sin] * 8), None),
}


@pytest.mark.parametrize("name", SINE_COUNTS)
def test_chains_of_sines(name):
    fun, again = SINE_COUNTS[name]
    forward, backward = counts(fun, [leaf(3)], "sin", "cos")
    assert forward == {"sin": 8, "cos": 0}
    if again is not None:
        assert backward == {"sin": again, "cos": 8}
    else:
        assert backward["cos"] == 8


def test_recursion_holds_little_and_runs_as_often_as_in_jax():
    """Of 2^k sines each half is checkpointed in turn: k/2 more runs of each, k values held."""
    for k, again in {2: 1, 3: 5, 4: 17, 5: 49}.items():
        n = 2**k
        fun = recursive_checkpoint([torch.sin] * n)
        forward, backward = counts(fun, [leaf(3)], "sin", "cos")
        assert forward == {"sin": n, "cos": 0}
        assert backward == {"sin": again, "cos": n}


# --- JAX's tests of policies ---------------------------------------------------------------------


def squares(x):
    for _ in range(3):
        x = torch.sin(x @ x)
    return x


def test_dots_of_squares():
    """`test_remat_checkpoint_dots`: two sines and six products in the backward."""
    assert counts(tr.checkpoint(squares, policy="dots"), [leaf(2, 2)], "sin", "mm")[1] == {
        "sin": 2,
        "mm": 6,
    }


def batched_squares(x):
    for _ in range(3):
        x = torch.sin(torch.einsum("ijk,ikl->ijl", x, x))
    return x


def test_products_with_batch_dimensions_are_not_saved():
    """`test_remat_checkpoint_dots_with_no_batch_dims2`: nine products in the backward."""
    policy = cp.dots_with_no_batch_dims_saveable
    fun = tr.checkpoint(batched_squares, policy=policy)
    assert counts(fun, [leaf(3, 2, 2)], "sin", "bmm")[1] == {"sin": 2, "bmm": 9}
    fun = tr.checkpoint(batched_squares, policy=cp.dots_saveable)
    assert counts(fun, [leaf(3, 2, 2)], "sin", "bmm")[1] == {"sin": 2, "bmm": 6}


@pytest.mark.parametrize(
    ("policy", "sin", "cos"),
    [
        (lambda op, *_, **__: op is torch.ops.aten.sin.default, 0, 2),
        (lambda op, *_, **__: op is torch.ops.aten.cos.default, 1, 2),
        (lambda *_, **__: True, 0, 2),
        (lambda *_, **__: False, 1, 2),
    ],
    ids=["save sin", "save cos", "all", "none"],
)
def test_custom_policies(policy, sin, cos):
    """`test_remat_custom_policy`: of sin(sin(x)), where PyTorch computes cosines backward."""
    fun = tr.checkpoint(lambda x: torch.sin(torch.sin(x)), policy=policy)
    assert counts(fun, [leaf(3)], "sin", "cos") == (
        {"sin": 2, "cos": 0},
        {"sin": sin, "cos": cos},
    )


def test_what_is_linear_runs_once():
    """`test_remat_of_linear`-like: nothing in it is needed again."""
    w = torch.ones(3, 3, dtype=D)
    fun = tr.checkpoint(lambda x: (x * 2) @ w)
    assert counts(fun, [leaf(3, 3)], "mm", "mul") == ({"mm": 1, "mul": 1}, {"mm": 1, "mul": 1})


def test_trivial_derivatives_recompute_nothing():
    """`test_remat_no_redundant_flops`: what the cotangent does not need is not computed."""
    fun = tr.checkpoint(lambda x: torch.sin(x).sum() * 0 + x.sum())
    forward, backward = counts(fun, [leaf(3)], "sin", "cos")
    assert forward == {"sin": 1, "cos": 0}
    assert backward == {"sin": 0, "cos": 1}


def test_values_that_two_readers_need_are_computed_again_once():
    def fun(x):
        y = torch.exp(x)
        return torch.sin(y) * torch.cos(y)

    forward, backward = counts(tr.checkpoint(fun), [leaf(3)], "exp", "sin", "cos")
    assert forward == {"exp": 1, "sin": 1, "cos": 1}
    assert backward == {"exp": 1, "sin": 2, "cos": 2}


def test_two_backwards_run_it_twice():
    fun = tr.checkpoint(lambda x: torch.sin(torch.sin(x)))
    x = leaf(3)
    y = fun(x).sum()
    with OpCounter() as counter:
        torch.autograd.grad(y, x, retain_graph=True)
        torch.autograd.grad(y, x)
    assert counter.only("sin", "cos") == {"sin": 2, "cos": 4}

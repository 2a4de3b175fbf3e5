"""Random compositions of transformations equal their meaning in plain PyTorch.

`python -m tests.derivatives.compositions 0 1000` checks as many, and prints what differs.
"""

from dataclasses import replace

import pytest
from torch.utils import _pytree as pytree

from tests.derivatives.compositions import (
    Composition,
    check,
    checkpoint,
    custom_jvp,
    custom_vjp,
    custom_vmap,
    draw_composition,
    grad,
    hessian,
    jacfwd,
    jit,
    jvp,
    linearize,
    shrink,
    vjp,
    vmap,
)
from tests.derivatives.small_functions import SmallFunction

QUICK = range(12)
MANY = range(1000, 3000)


def check_seeds(seeds):
    """The kinds of verdicts; fail with the smallest composition that fails alike."""
    kinds, failures = [], []
    for seed in seeds:
        composition = draw_composition(seed)
        verdict = check(composition)
        kinds.append(verdict.kind)
        if verdict.is_failure:
            smallest, verdict = shrink(composition)
            failures.append(f"seed {seed}: {smallest}\n    {verdict.kind}: {verdict.text}")
    assert not failures, "\n".join(failures)
    return kinds


@pytest.mark.parametrize("seed", QUICK)
def test_a_composition(seed):
    assert check_seeds([seed])[0] in {"equal", "refused"}


def composition(function, *transformations, by):
    return Composition(SmallFunction(*function), transformations, by)


@pytest.mark.parametrize(
    "found",
    [
        composition(
            ((("sigmoid", 0, 1),), (("vector", 2),)),
            *(jit(None), custom_jvp(True), grad((0, 1))),
            by="autograd",
        ),
        composition(((("noise", 0, 0),), (("vector", 0),)), linearize(None), by="call"),
        composition(((("norm", 1, 1),), (("vector", 2),)), linearize(None), hessian(1), by="call"),
        composition(
            ((), (("sum", 0),)),
            *(custom_vmap(None), custom_jvp(False), checkpoint("none")),
            by="autograd",
        ),
        composition(
            ((("constant", 1, 0), ("expand", 2, 0)), (("column", 3),)),
            *(jvp(None), custom_jvp(True)),
            by="call",
        ),
        composition(
            ((("softmax", 1, 1),), (("sum", 2),)),
            *(vmap(((0, 0), 1)), custom_jvp(False)),
            by="autograd",
        ),
        composition(
            ((("write view", 0, 1),), (("vector", 1), ("column", 2))),
            *(vmap(((0, None), None)), custom_vjp(True)),
            by="autograd",
        ),
        composition(
            ((("matmul", 0, 1),), (("sum", 2),)),
            *(jit(None), vjp(None), custom_vjp(True)),
            by="call",
        ),
        composition(
            ((("write view", 1, 0),), (("vector", 2),)),
            *(linearize(None), vjp(None)),
            by="autograd",
        ),
        composition(
            ((("write view", 1, 0),), (("vector", 2),)),
            *(vmap(((0, 0), None)), linearize(None)),
            by="autograd",
        ),
        composition(
            ((), (("vector", 1),)),
            *(linearize(None), jvp(None), hessian((0, 1))),
            by="call",
        ),
        composition(
            ((("tanh", 0, 1),), (("sum", 2),)),
            *(hessian(0), custom_vmap(None), jit(None)),
            by="call",
        ),
        composition(
            ((("add", 0, 1), ("add", 2, 1)), (("sum", 3), ("vector", 1), ("integers", 0))),
            *(vmap(((None, 0), 2)), jvp(None), grad((0, 1))),
            by="autograd",
        ),
        composition(
            ((("write row", 1, 1),), (("column", 2),)),
            *(vmap(((0, 0), None)), jacfwd(1)),
            by="call",
        ),
    ],
    ids=[
        "constants of a derivative",
        "numbers that nothing reads",
        "shapes of zeros",
        "values made with tangents",
        "tangents of what is expanded",
        "second derivatives where an input is not read",
        "outputs that all examples share",
        "constants of a backward rule",
        "gradients of a write to a slice",
        "a mapped write to a slice",
        "zeros without memory",
        "values saved for a batch",
        "tangents of chunks",
        "writes to rows of tangents",
    ],
)
@pytest.mark.sampled(3)
def test_a_composition_that_differed(found):
    assert check(found).kind == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("start", range(MANY.start, MANY.stop, 100))
def test_a_hundred_compositions(start):
    assert check_seeds(range(start, start + 100)).count("equal") >= 90


def test_a_wrong_transformation_is_found_and_made_small():
    def double(f):
        return lambda x, y: pytree.tree_map(lambda t: t * 2, f(x, y))

    wrong = replace(checkpoint("full"), ours=double)
    function = SmallFunction((("sin", 0, 0), ("mul", 2, 1)), (("sum", 3), ("vector", 0)))
    smallest, verdict = shrink(Composition(function, (vjp(None), wrong), "autograd"))
    assert verdict.kind == "differs"
    assert smallest.transformations == (wrong,) and smallest.by == "call"
    assert smallest.function.steps == () and len(smallest.function.outputs) == 1

"""Random compositions of transformations over small functions, and the same in plain PyTorch.

Every transformation takes a function of two vectors that returns a dict, and gives one again, so
that any three nest. Each is written twice: with this library, and as its meaning in `torch.func`,
where a checkpoint and a custom rule are the function itself. `check` compares the two: values,
auxiliary data and gradients by plain autograd, of first and second order.

    python -m tests.derivatives.compositions 0 1000     checks that many, and prints what differs
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import torchremat as tr
from tests.derivatives.small_functions import SIZE, SmallFunction
from torchremat.errors import EffectError, ForwardModeError

Function = Callable[[Tensor, Tensor], Any]
POLICIES = ("full", "none", "dots", "budget:1MiB", None)
ARGNUMS = (0, 1, (0, 1))


# --- what all transformations share --------------------------------------------------------------


def floats(tree: Any) -> list[Tensor]:
    """The leaves that have derivatives."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def rest(tree: Any) -> list[Tensor]:
    """All other tensors."""
    leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    return [t for t in leaves if not t.is_floating_point()]


def weigh(tree: Any) -> Tensor:
    """Make a scalar of all floating-point leaves, each number of which has a weight."""
    total = torch.zeros((), dtype=torch.double)
    for i, leaf in enumerate(floats(tree)):
        weights = torch.cos(torch.arange(leaf.numel(), dtype=torch.double) + i)
        total = total + (leaf.reshape(-1) * weights).sum()
    return total


def scalar(f: Function) -> Function:
    """A pair of the weighted sum and everything."""

    def loss(x: Tensor, y: Tensor) -> Any:
        out = f(x, y)
        return weigh(out), out

    return loss


def parts(f: Function) -> Function:
    """A pair of the floating-point leaves and all others."""

    def split(x: Tensor, y: Tensor) -> Any:
        out = f(x, y)
        return floats(out), rest(out)

    return split


def directions(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents that depend on the primals."""
    return torch.cos(x), x * y


def cotangent(t: Tensor, x: Tensor) -> Tensor:
    """A cotangent of `t` that depends on `x`."""
    return t * 0.5 + x.sum()


# --- transformations, ours and theirs ------------------------------------------------------------


@dataclass(frozen=True)
class Transformation:
    """`ours(f)` must equal `theirs(f)`. `option` is what the two were made with."""

    name: str
    option: Any
    ours: Callable[[Function], Function]
    theirs: Callable[[Function], Function]

    def __repr__(self) -> str:
        return f"{self.name}[{self.option}]" if self.option is not None else self.name


def grad(argnums: Any) -> Transformation:
    """The gradient, with auxiliary data."""

    def ours(f: Function) -> Function:
        def run(x: Tensor, y: Tensor) -> Any:
            found, aux = tr.grad(scalar(f), argnums, has_aux=True)(x, y)
            return {"grad": found, "aux": aux}

        return run

    def theirs(f: Function) -> Function:
        def run(x: Tensor, y: Tensor) -> Any:
            found, aux = torch.func.grad(scalar(f), argnums, has_aux=True)(x, y)
            return {"grad": found, "aux": aux}

        return run

    return Transformation("grad", argnums, ours, theirs)


def value_and_grad(argnums: Any) -> Transformation:
    """Value, gradient and auxiliary data; arguments that are not differentiated are closed over."""

    def ours(f: Function) -> Function:
        def run(x: Tensor, y: Tensor) -> Any:
            if argnums == 0:
                both = tr.value_and_grad(lambda x: scalar(f)(x, y), has_aux=True)(x)
            else:
                both = tr.value_and_grad(scalar(f), argnums, has_aux=True)(x, y)
            (value, aux), found = both
            return {"value": value, "aux": aux, "grad": found}

        return run

    def theirs(f: Function) -> Function:
        def run(x: Tensor, y: Tensor) -> Any:
            both = torch.func.grad_and_value(scalar(f), argnums, has_aux=True)(x, y)
            found, (value, aux) = both
            return {"value": value, "aux": aux, "grad": found}

        return run

    return Transformation("value_and_grad", argnums, ours, theirs)


def vjp(_: Any) -> Transformation:
    """Outputs and the cotangents of the arguments."""

    def ours(f: Function) -> Function:
        def run(x: Tensor, y: Tensor) -> Any:
            out, pull = tr.vjp(f, x, y)
            cts = pytree.tree_map(lambda t: cotangent(t, x) if floats(t) else None, out)
            return {"out": out, "ct": pull(cts)}

        return run

    def theirs(f: Function) -> Function:
        def run(x: Tensor, y: Tensor) -> Any:
            out, pull, others = torch.func.vjp(parts(f), x, y, has_aux=True)
            return {"out": (out, others), "ct": pull([cotangent(t, x) for t in out])}

        return run

    return Transformation("vjp", None, ours, theirs)


def _tangents(found: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(found) if t is not None]


def _forward(name: str, push: Callable[..., Any]) -> Transformation:
    def ours(f: Function) -> Function:
        def run(x: Tensor, y: Tensor) -> Any:
            out, found = push(f, x, y)
            return {"out": (floats(out), rest(out)), "t": _tangents(found)}

        return run

    def theirs(f: Function) -> Function:
        def run(x: Tensor, y: Tensor) -> Any:
            out, found, others = torch.func.jvp(parts(f), (x, y), directions(x, y), has_aux=True)
            return {"out": (out, others), "t": found}

        return run

    return Transformation(name, None, ours, theirs)


def jvp(_: Any) -> Transformation:
    """Outputs and their tangents."""
    return _forward("jvp", lambda f, x, y: tr.jvp(f, (x, y), directions(x, y)))


def linearize(_: Any) -> Transformation:
    """Outputs and the linear function of tangents."""

    def push(f: Function, x: Tensor, y: Tensor) -> Any:
        out, linear = tr.linearize(f, x, y)
        return out, linear(*directions(x, y))

    return _forward("linearize", push)


def _jacobian(name: str, argnums: Any, mine: Any, other: Any) -> Transformation:
    def with_(derive: Any) -> Callable[[Function], Function]:
        def transform(f: Function) -> Function:
            def run(x: Tensor, y: Tensor) -> Any:
                found, aux = derive(parts(f), argnums, has_aux=True)(x, y)
                return {"jacobian": found, "aux": aux}

            return run

        return transform

    return Transformation(name, argnums, with_(mine), with_(other))


def jacfwd(argnums: Any) -> Transformation:
    """All columns."""
    return _jacobian("jacfwd", argnums, tr.jacfwd, torch.func.jacfwd)


def jacrev(argnums: Any) -> Transformation:
    """All rows."""
    return _jacobian("jacrev", argnums, tr.jacrev, torch.func.jacrev)


def hessian(argnums: Any) -> Transformation:
    """Second derivatives of the weighted sum."""

    def with_(derive: Any) -> Callable[[Function], Function]:
        return lambda f: (
            lambda x, y: {"hessian": derive(lambda x, y: weigh(f(x, y)), argnums)(x, y)}
        )

    return Transformation("hessian", argnums, with_(tr.hessian), with_(torch.func.hessian))


def vmap(option: tuple[Any, int | None]) -> Transformation:
    """Three examples, mapped at axis 0 or 1 of the first argument, or of both."""
    axes, chunk_size = option

    def with_(derive: Callable[..., Any]) -> Callable[[Function], Function]:
        def transform(f: Function) -> Function:
            def run(x: Tensor, y: Tensor) -> Any:
                examples = [
                    t if axis is None else torch.stack([t, t * 0.7, torch.sin(t)], axis)
                    for t, axis in zip((x, y), axes, strict=True)
                ]
                return derive(f)(*examples)

            return run

        return transform

    return Transformation(
        "vmap",
        option,
        with_(lambda f: tr.vmap(f, axes, chunk_size=chunk_size)),
        with_(lambda f: torch.func.vmap(f, axes, chunk_size=chunk_size)),
    )


def _identity(f: Function) -> Function:
    return f


def checkpoint(policy: Any) -> Transformation:
    """It changes nothing but memory."""
    return Transformation(
        "checkpoint", policy, lambda f: tr.checkpoint(f, policy=policy), _identity
    )


def jit(_: Any) -> Transformation:
    """It changes nothing but speed."""
    return Transformation("jit", None, lambda f: tr.jit(f, backend="eager"), _identity)


def custom_jvp(calls_itself: bool) -> Transformation:
    """A rule that is the derivative; it may call the function with the rule again."""

    def ours(f: Function) -> Function:
        custom = tr.custom_jvp(f)

        def rule(primals: Any, tangents: Any) -> Any:
            out, found = tr.jvp(f, primals, tangents)
            return (custom(*primals) if calls_itself else out), found

        custom.defjvp(rule)
        return custom

    return Transformation("custom_jvp", calls_itself or None, ours, _identity)


def custom_vjp(calls_itself: bool) -> Transformation:
    """Rules that are the derivative; forward mode alone is refused."""

    def ours(f: Function) -> Function:
        custom = tr.custom_vjp(f)

        def fwd(x: Tensor, y: Tensor) -> Any:
            return (custom if calls_itself else f)(x, y), (x, y)

        def bwd(primals: Any, cotangents: Any) -> Any:
            return tr.vjp(f, *primals)[1](cotangents)

        custom.defvjp(fwd, bwd)
        return custom

    return Transformation("custom_vjp", calls_itself or None, ours, _identity)


def custom_vmap(_: Any) -> Transformation:
    """A rule that maps the function."""

    def ours(f: Function) -> Function:
        custom = tr.custom_vmap(f)

        @custom.def_vmap
        def rule(size: int, batched: Any, x: Tensor, y: Tensor) -> Any:
            axes = tuple(0 if b else None for b in batched)
            return tr.vmap(f, axes, axis_size=size)(x, y), True

        return custom

    return Transformation("custom_vmap", None, ours, _identity)


AXES = [((0, None), None), ((0, 0), None), ((1, 0), None), ((None, 0), 2), ((0, 0), 1)]
FACTORIES: dict[Callable[[Any], Transformation], tuple[Any, ...]] = {
    grad: ARGNUMS,
    value_and_grad: ARGNUMS,
    vjp: (None,),
    jvp: (None,),
    linearize: (None,),
    jacfwd: ARGNUMS,
    jacrev: ARGNUMS,
    hessian: ARGNUMS,
    vmap: tuple(AXES),
    checkpoint: POLICIES,
    jit: (None,),
    custom_jvp: (False, True),
    custom_vjp: (False, True),
    custom_vmap: (None,),
}
# these would draw once more than plain PyTorch, or other numbers for each example
_DRAW_AGAIN = {custom_jvp, custom_vjp, custom_vmap, vmap, jacfwd, jacrev, hessian}


# --- a composition, and its check ----------------------------------------------------------------


@dataclass(frozen=True)
class Composition:
    """`transformations`, the outermost first, of `function`, evaluated `by`."""

    function: SmallFunction
    transformations: tuple[Transformation, ...]
    by: str
    """`call`, or `autograd` with gradients of first and second order."""

    def apply(self, side: str) -> Function:
        """The transformed function, with `ours` or `theirs`."""
        f: Function = self.function
        for transformation in reversed(self.transformations):
            f = getattr(transformation, side)(f)
        return f

    def smaller(self) -> list["Composition"]:
        """What to try to find why it fails."""
        count = len(self.transformations)
        drop = [
            replace(self, transformations=self.transformations[:i] + self.transformations[i + 1 :])
            for i in range(count)
        ]
        simple = [replace(self, by="call")] if self.by != "call" else []
        return [*drop, *simple, *(replace(self, function=f) for f in self.function.shorter())]


def draw_composition(seed: int) -> Composition:
    """The composition of a seed."""
    rng = random.Random(seed)
    draws = rng.random() < 0.15
    factories = [f for f in FACTORIES if not (draws and f in _DRAW_AGAIN)]
    chosen = [rng.choice(factories) for _ in range(rng.choice((1, 2, 2, 3, 3, 3)))]
    transformations = tuple(f(rng.choice(FACTORIES[f])) for f in chosen)
    by = rng.choice(("call", "autograd"))
    return Composition(SmallFunction.draw(rng, draws=draws), transformations, by)


def _arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.rand(SIZE, generator=generator, dtype=torch.double) + 0.2 for _ in range(2))
    return x, y


def evaluate(f: Function, by: str) -> list[Tensor]:
    """The leaves of the result, with gradients of its weighted sum by plain autograd."""
    torch.manual_seed(0)
    x, y = _arguments()
    if by == "call":
        out = f(x, y)
        return [*floats(out), *rest(out), torch.get_rng_state()]
    xs = (x.requires_grad_(), y.requires_grad_())
    out = f(*xs)
    found = [*floats(out), *rest(out), torch.get_rng_state()]
    loss = weigh(out)
    for _ in range(2):
        grads = [torch.zeros_like(t) for t in xs]
        if loss.requires_grad:
            given = torch.autograd.grad(loss, xs, create_graph=True, allow_unused=True)
            grads = [z if g is None else g for z, g in zip(grads, given, strict=True)]
        found += grads
        loss = weigh([g.sin() for g in grads])
    return found


@dataclass(frozen=True)
class Verdict:
    """How a check ended: `equal`, `refused` rightly, `no oracle`, `differs` or `raises`."""

    kind: str
    text: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in {"differs", "raises"}


def check(composition: Composition) -> Verdict:
    """Compare the composition with plain PyTorch."""
    try:
        expected = evaluate(composition.apply("theirs"), composition.by)
    except Exception as error:
        return Verdict("no oracle", _describe(error))
    try:
        found = evaluate(composition.apply("ours"), composition.by)
    except ForwardModeError as error:
        if _meets_forward_mode(composition):
            return Verdict("refused", _describe(error))
        return Verdict("raises", _describe(error))
    except EffectError as error:
        kind = "refused" if _draws_anew(composition) else "raises"
        return Verdict(kind, _describe(error))
    except (Exception, RecursionError) as error:
        kind = "no oracle" if _fails_alike(composition, error) else "raises"
        return Verdict(kind, _describe(error))
    try:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    except AssertionError as error:
        return Verdict("differs", str(error))
    return Verdict("equal")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


_FORWARD = {"jvp", "linearize", "jacfwd", "hessian", "custom_jvp"}


def _meets_forward_mode(composition: Composition) -> bool:
    """Whether forward mode meets a `custom_vjp` call itself, which has no rule for it."""
    names = [t.name for t in composition.transformations]
    if "custom_vjp" not in names:
        return False
    inner = len(names) - 1 - names[::-1].index("custom_vjp")
    return bool(_FORWARD & set(names[:inner]))


def _draws_anew(composition: Composition) -> bool:
    """Whether a second derivative meets random numbers of a checkpoint inside of another."""
    names = [t.name for t in composition.transformations]
    is_nested = sum(name in {"checkpoint", "jit"} for name in names) > 1
    return is_nested and composition.by == "autograd" and composition.function.draws_random


def _fails_alike(composition: Composition, error: BaseException) -> bool:
    """Whether PyTorch fails as well, where `jvp` differentiates what has a rule for tangents."""
    transformations = tuple(
        jvp(None) if t.name == "custom_jvp" else t for t in composition.transformations
    )
    if transformations == composition.transformations:
        return False
    try:
        plain = replace(composition, transformations=transformations).apply("theirs")
        evaluate(plain, composition.by)
    except Exception as other:
        return _describe(other)[:60] == _describe(error)[:60]
    return False


def shrink(composition: Composition) -> tuple[Composition, Verdict]:
    """The smallest composition found that fails in the same way."""
    verdict = check(composition)
    while True:
        for smaller in composition.smaller():
            found = check(smaller)
            if found.is_failure and found.text[:30] == verdict.text[:30]:
                composition, verdict = smaller, found
                break
        else:
            return composition, verdict


def main() -> None:
    """Check the compositions of a range of seeds."""
    start, stop = int(sys.argv[1]), int(sys.argv[2])
    counts: Counter[str] = Counter()
    for seed in range(start, stop):
        verdict = check(composition := draw_composition(seed))
        counts[verdict.kind] += 1
        if verdict.is_failure:
            smallest, verdict = shrink(composition)
            print(f"{seed}: {smallest}\n    {verdict.kind}: {verdict.text}", flush=True)
        if verdict.kind == "no oracle":
            print(seed, composition, verdict, file=sys.stderr, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()

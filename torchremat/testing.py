"""Checks for users' own tests: a checkpoint changes nothing but memory; derivatives are right."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchremat import _torch
from torchremat.errors import ArgumentValueError
from torchremat.policies.policy import PolicyLike
from torchremat.remat.checkpoint import checkpoint
from torchremat.remat.tracing.guards.variables import modules_in, variables_of
from torchremat.report.explain import explain
from torchremat.report.live_bytes import HeldBytes

__all__ = ["RematCheck", "check_grads", "check_remat"]


def __dir__() -> list[str]:
    return sorted(__all__)


# Second derivatives are sums in another order than plain PyTorch's: far above the rounding of
# float64 (2e-16), far below a wrong term. Chosen by hand; nothing depends on the exact value.
_TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10}


@dataclass(frozen=True)
class RematCheck:
    """The figures of `check_remat`.

    Attributes:
        held_bytes: bytes that autograd saves under the checkpoint.
        plain_held_bytes: bytes that it saves without.
        recomputed: operators that ran once more, with their number.
    """

    held_bytes: int
    plain_held_bytes: int
    recomputed: Counter[str]


def check_remat(
    f: Callable[..., Any], *args: Any, policy: PolicyLike | None = None, **kwargs: Any
) -> RematCheck:
    """Check that `checkpoint(f, policy=policy)` computes what `f` computes.

    A plain run of PyTorch must give the same outputs, first derivatives, buffers of modules and
    random stream, bit for bit. Second derivatives are equal to rounding. Autograd must save as many
    bytes as `explain` says.

    Args:
        f: a function, or an `nn.Module`.
        *args: its arguments. Differentiated are those tensors, and the parameters of modules that
            `f` is or closes over, that require a gradient; all floating arguments if none does.
        policy: as `checkpoint` takes it.
        **kwargs: its keyword arguments.

    Returns:
        The bytes saved, and the operators that ran again.

    Raises:
        AssertionError: that says what differs.

    >>> import torch
    >>> found = check_remat(lambda x, w: torch.sin(x @ w), torch.ones(2, 3), torch.ones(3, 3))
    >>> found.held_bytes, found.recomputed
    (0, Counter({'aten.mm.default': 1}))
    """
    modules = _modules_of(f)
    leaves = _leaves(args, kwargs, modules)
    remat = checkpoint(f, policy=policy)
    with _restore_state(modules):
        plain = _run(f, args, kwargs, leaves, modules)
    with _restore_state(modules):
        _run(remat, args, kwargs, leaves, modules)  # the first call traces
    with _restore_state(modules):
        ours = _run(remat, args, kwargs, leaves, modules)
    for what in ("outputs", "gradients", "buffers", "random_state"):
        _assert_equal(what, getattr(plain, what), getattr(ours, what))
    _assert_close("second derivatives", plain.second, ours.second)
    said = explain(f, *args, policy="full" if policy is None else policy, **kwargs)
    assert said.total == ours.held_bytes, (
        f"explain says that {said.total} bytes are saved, but autograd saves {ours.held_bytes}"
    )
    again = ours.operators - plain.operators
    return RematCheck(ours.held_bytes, plain.held_bytes, again)


def check_grads(
    f: Callable[..., Any], *args: Any, order: int = 2, rtol: float = 1e-3, atol: float = 1e-5
) -> None:
    """Check the derivatives of `f` against finite differences, in reverse mode up to `order`.

    `torch.autograd.gradcheck` and `gradgradcheck` compare them. Differentiated arguments must be
    `float64` or `complex128`. Arguments and results are trees. Raises `ValueError` for another
    dtype or order, and `torch.autograd.gradcheck.GradcheckError` (a `RuntimeError`) where
    derivatives are wrong.

    >>> import torch
    >>> check_grads(torch.sin, torch.ones(3, dtype=torch.float64))
    >>> w = {"a": torch.ones(3, dtype=torch.float64)}
    >>> check_grads(lambda w: {"y": w["a"].exp()}, w)
    """
    if order not in (1, 2):
        raise ArgumentValueError(f"check_grads goes to order 1 or 2, but order is {order!r}")
    leaves, spec = _torch.tree_flatten(args)
    inputs = [_as_input(leaf) for leaf in leaves]

    def run_flat(*leaves: Any) -> tuple[Tensor, ...]:
        return tuple(_tensors(f(*_torch.tree_unflatten(list(leaves), spec))))

    torch.autograd.gradcheck(run_flat, inputs, rtol=rtol, atol=atol)
    if order == 2:
        torch.autograd.gradgradcheck(run_flat, inputs, rtol=rtol, atol=atol)


def _as_input(value: Any) -> Any:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    if value.dtype not in _TOLERANCES:
        raise ArgumentValueError(
            f"finite differences need float64 or complex128, but an argument is {value.dtype}: "
            "convert it with .double()"
        )
    return value.detach().clone().requires_grad_()


# --- one run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    second: list[Tensor | None]
    buffers: list[Tensor]
    random_state: list[Tensor]
    held_bytes: int
    operators: Counter[str]


def _run(
    f: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Tensor], modules: list[nn.Module]
) -> _Run:
    arguments = list(_tensors((args, kwargs)))
    parameters = [p for module in modules for p in module.parameters()]
    buffers = [b for module in modules for b in module.buffers()]
    was_leaf = [t.requires_grad for t in leaves]
    for tensor in leaves:
        tensor.requires_grad_()
    try:
        with HeldBytes(arguments, parameters, buffers, leaves) as held:
            outputs = list(_tensors(f(*args, **kwargs)))
        random_state = [torch.get_rng_state()]
        with _Operators() as operators:
            grads = _gradients(outputs, leaves)
        after = [b.clone() for b in buffers]
        second = _second_gradients(f, args, kwargs, leaves)
        return _Run(
            [o.detach() for o in outputs],
            grads,
            second,
            after,
            random_state,
            held.total,
            operators.counts,
        )
    finally:
        for tensor, flag in zip(leaves, was_leaf, strict=True):
            tensor.requires_grad_(flag)


def _gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor | None]:
    chosen = [o for o in outputs if o.requires_grad]
    if not chosen or not leaves:
        return [None] * len(leaves)
    cotangents = [torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape).to(o) for o in chosen]
    return list(
        torch.autograd.grad(
            chosen, leaves, cotangents, allow_unused=True, create_graph=create_graph
        )
    )


def _second_gradients(f: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Tensor]) -> Any:
    torch.manual_seed(0)
    outputs = list(_tensors(f(*args, **kwargs)))
    try:
        first = _gradients(outputs, leaves, create_graph=True)
        return _gradients([g for g in first if g is not None], leaves)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        return [None] * len(leaves)  # an operator of which PyTorch has no second derivative


class _Operators(_torch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.reshape.default:  # a view, for cotangents of any layout
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


# --- state ---------------------------------------------------------------------------------------


def _modules_of(f: Callable[..., Any]) -> list[nn.Module]:
    owner = getattr(f, "__self__", f)
    own = [owner] if isinstance(owner, nn.Module) else []
    return own + [module for _, module in modules_in(variables_of(f))]


def _leaves(args: Any, kwargs: Any, modules: list[nn.Module]) -> list[Tensor]:
    given = [t for t in _tensors((args, kwargs)) if t.is_floating_point() or t.is_complex()]
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    wanted = [t for t in given if t.requires_grad]
    found = wanted + parameters or given
    return list({id(t): t for t in found}.values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    leaves, _ = _torch.tree_flatten(tree)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


@contextmanager
def _restore_state(modules: list[nn.Module]) -> Iterator[None]:
    buffers = [b for module in modules for b in module.buffers()]
    values = [b.clone() for b in buffers]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)


# --- comparison ----------------------------------------------------------------------------------


def _assert_equal(what: str, plain: Sequence[Any], ours: Sequence[Any]) -> None:
    assert len(plain) == len(ours), f"{len(ours)} {what} instead of {len(plain)}"
    for i, (a, b) in enumerate(zip(plain, ours, strict=True)):
        if a is None and b is None:
            continue
        assert a is not None and b is not None, f"{what}[{i}] is {b}, plain PyTorch has {a}"
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), (
            f"{what}[{i}] of shape {tuple(a.shape)} differs from plain PyTorch by "
            f"{(a - b).abs().max()}"
        )


def _assert_close(what: str, plain: Sequence[Any], ours: Sequence[Any]) -> None:
    for i, (a, b) in enumerate(zip(plain, ours, strict=True)):
        if a is None and b is None:
            continue
        assert a is not None and b is not None, f"{what}[{i}] is {b}, plain PyTorch has {a}"
        tolerance = _TOLERANCES.get(a.dtype, 1e-4)
        torch.testing.assert_close(
            b, a, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )

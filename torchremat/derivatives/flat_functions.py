"""Functions of trees as functions of the tensors in them that are differentiated."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import as_argnums
from torchremat.core.avals import Aval
from torchremat.core.trees import HOLE, Structure, scatter_values
from torchremat.derivatives.rule_arguments import describe_tree, flatten_up_to, name_of
from torchremat.derivatives.rules import is_inexact
from torchremat.errors import DerivativeShapeError, DerivativeTypeError
from torchremat.tracing.tracing import lift_all


def check_callable(fun: Any, what: str) -> None:
    """Raise `DerivativeTypeError` (a `TypeError`) if `what` was given no function."""
    if not callable(fun):
        raise DerivativeTypeError(
            f"{what} takes a function or an nn.Module, but it was given {fun!r} "
            f"({type(fun).__name__})"
        )


def resolve_argnums(argnums: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    """The positions that `argnums` names among `args`; `DerivativeTypeError` if one has none."""
    numbers = as_argnums(argnums, "argnums")
    least = max((n + 1 if n >= 0 else -n for n in numbers), default=0)
    if least > len(args):
        raise DerivativeTypeError(
            f"differentiating with respect to argnums={argnums} requires at least {least} "
            f"positional arguments to be passed by the caller, but got only {len(args)} positional "
            "arguments."
        )
    return tuple(n % len(args) for n in numbers)


@dataclass(eq=False)
class Flattened:
    """`fun` as a function of the floating-point tensors among the arguments at `argnums`.

    It returns a tuple of the outputs that have derivatives, and one of all other tensors. After a
    call `unflatten_result` makes trees of such values.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    argnums: tuple[int, ...]
    has_aux: bool
    check: Callable[[Any], None] | None = None
    """It is called with the result, and raises if that cannot be differentiated."""
    out: Structure | None = field(default=None, init=False)
    aux: Structure | None = field(default=None, init=False)
    out_avals: list[Aval] = field(default_factory=list, init=False)
    is_inexact: list[bool] = field(default_factory=list, init=False)
    """For each of `out_avals`, whether it has derivatives."""

    def __post_init__(self) -> None:
        chosen = tuple(self.args[i] for i in self.argnums)
        leaves, self.spec = _torch.tree_flatten(chosen)
        self.leaves = [torch.tensor(x) if isinstance(x, float | complex) else x for x in leaves]
        self.wrt = [i for i, leaf in enumerate(self.leaves) if is_inexact(leaf)]

    @property
    def values(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.wrt]

    def __call__(
        self, *tensors: Tensor, at_level: bool = False
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Call the function; `at_level` of `torch.func`, which differentiates by `tensors`."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.wrt, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = list(self.args), self.kwargs
        if at_level:  # or the function could not write to them, as to what it closes over
            args, kwargs = _torch.tree_map(_wrap_inexact, (args, dict(kwargs)))
        chosen = _torch.tree_unflatten(leaves, self.spec)
        for i, arg in zip(self.argnums, chosen, strict=True):
            args[i] = arg
        result, aux = self.fun(*args, **kwargs), None
        if self.has_aux:
            result, aux = self._check_pair(result)
        if self.check is not None:
            self.check(result)
        self.out, self.aux = Structure.of(result), Structure.of(aux)
        outputs = self.out.flatten(result)
        self.out_avals = list(map(Aval.of, outputs))
        self.is_inexact = list(map(is_inexact, outputs))
        return (
            tuple(o for o in outputs if is_inexact(o)),
            (*(o for o in outputs if not is_inexact(o)), *self.aux.flatten(aux)),
        )

    def call_for_functorch(self, *tensors: Tensor) -> Any:
        outputs, others = self(*tensors, at_level=True)
        return outputs or (torch.zeros(()),), others  # torch.func takes no empty tuple

    def replace_values(self, values: Sequence[Tensor]) -> "Flattened":
        other = copy.copy(self)
        other.leaves = list(self.leaves)
        for i, value in zip(self.wrt, values, strict=True):
            other.leaves[i] = value
        return other

    @property
    def num_inexact(self) -> int:
        return sum(self.is_inexact)

    def _check_pair(self, result: Any) -> Any:
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise DerivativeTypeError(
                f"with has_aux=True, {name_of(self.fun)} must return a pair of the value to "
                f"differentiate and auxiliary data, but it returned {describe_tree(result)}"
            )
        return result

    def unflatten_result(self, inexact: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, Any]:
        assert self.out is not None and self.aux is not None, "the function has run"
        ours, others = iter(inexact), iter(rest)
        result = self.out.unflatten([next(ours if yes else others) for yes in self.is_inexact])
        return result, self.aux.unflatten(list(others))

    def unflatten_tangents(self, found: Sequence[Any]) -> Any:
        """Put values for the outputs that have derivatives in the tree, `None` for all others."""
        assert self.out is not None, "the function has run"
        tangents = iter(found)
        holes = iter([next(tangents) if yes else None for yes in self.is_inexact])
        leaves, spec = _torch.tree_flatten(Structure.of(self.out.tree, _is_hole).tree)
        return _torch.tree_unflatten([next(holes) if _is_hole(x) else None for x in leaves], spec)

    def unflatten_inputs(self, found: Sequence[Any]) -> tuple[Any, ...]:
        return _torch.tree_unflatten(  # type: ignore[no-any-return]
            scatter_values(found, self.wrt, len(self.leaves)), self.spec
        )

    def flatten_cotangents(self, given: Any) -> list[Tensor]:
        assert self.out is not None, "the function has run"
        try:
            leaves = flatten_up_to(given, self.out.tree)
        except ValueError:
            raise DerivativeTypeError(
                "unexpected tree structure of argument to vjp function: got "
                f"{describe_tree(given)}, but expected to match {self.out.tree}"
            ) from None
        kinds = _torch.tree_flatten(self.out.tree)[0]
        values = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if _is_hole(kind)]
        return [
            self._check_cotangent(value, aval)
            for value, aval, yes in zip(values, self.out_avals, self.is_inexact, strict=True)
            if yes
        ]

    def _check_cotangent(self, value: Any, aval: Aval) -> Tensor:
        value = as_scalar_tensor(value, aval)
        if not isinstance(value, Tensor) or not fits(value, aval):
            raise DerivativeShapeError(
                "unexpected type (e.g. shape/dtype) for argument to vjp function: got "
                f"{Aval.of(value) if isinstance(value, Tensor) else value!r}, but expected {aval} "
                f"because the corresponding output of the function {name_of(self.fun)} was {aval}"
            )
        return value


def _wrap_inexact(leaf: Any) -> Any:
    """Wrap what may be written to; integers stay lists of indices that Python can read."""
    return _torch.wrap_at_current_level(lift_all([leaf])[0]) if is_inexact(leaf) else leaf


def _is_hole(leaf: Any) -> bool:
    return leaf is HOLE


def as_scalar_tensor(value: Any, aval: Aval) -> Any:
    """Make a tensor of a Python number where `aval` is a scalar; return else `value` itself."""
    if isinstance(value, int | float | complex) and not aval.shape:
        return torch.tensor(value, dtype=aval.dtype, device=aval.device)
    return value


def fits(tensor: Tensor, aval: Aval) -> bool:
    """Whether `tensor` has the shape and the dtype of `aval`."""
    return tuple(tensor.shape) == aval.shape and tensor.dtype == aval.dtype


def conjugate_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Conjugate complex tensors: autograd's gradients are the conjugates of cotangents."""
    return [t.conj().resolve_conj() if t.is_complex() else t for t in tensors]

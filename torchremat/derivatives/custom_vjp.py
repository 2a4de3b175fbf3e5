"""`custom_vjp`: a function with a rule of its own for reverse mode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.core.trees import Structure
from torchremat.derivatives.rule_arguments import (
    RuleArguments,
    Signature,
    aval_of_value,
    holes_of,
    leaves_up_to,
    name_of,
    outline,
    put_together,
    take_apart,
)
from torchremat.derivatives.rule_dispatch import CustomVjpCall, uncompiled
from torchremat.derivatives.rules import Cotangents, Tensors, VjpRule
from torchremat.derivatives.symbolic_zeros import CustomVJPPrimal, SymbolicZero, zero_of
from torchremat.errors import MissingRuleError, RuleTypeError, RuleValueError
from torchremat.remat.op.make_graph import is_traced_whole


class custom_vjp:  # noqa: N801 (JAX's name, used as a decorator)
    """A function whose derivative in reverse mode is given by rules.

        out, residuals = fwd(*args)         the function, and what the way back needs
        cotangents = bwd(residuals, ct)     a tuple, one entry an argument

    Where nothing is differentiated `fun` runs; else `fwd`. The rules are differentiated themselves
    for derivatives of higher order, mapped under `vmap` (cotangents of an argument that all
    examples share are summed), and run inside a checkpoint, whose policy sees the operators in
    them. In a graph a call is one `function_p`, whose rules survive. Nothing is conjugated:
    `bwd` multiplies with the transpose of the Jacobian. Forward mode raises `TypeError`.

    Under plain autograd a residual that is a floating-point tensor and neither an argument nor an
    output makes the arguments be kept too: a derivative of the backward pass runs `fwd` again.

    Args:
        fun: a function of trees of tensors and Python values. It is called with positional
            arguments; keywords and defaults are resolved by its signature.
        nondiff_argnums: positions of arguments that are any Python values (functions, say). `fwd`
            takes them in their places, `bwd` first.

    Raises:
        AttributeError: if it is called before `defvjp`.
        TypeError: by a call, if a rule gives no result of the right structure, or the function is
            differentiated in forward mode; `ValueError`, if the shapes are wrong.
        ClosureError: (a `RuntimeError`) if a tensor that `fun` closes over has a gradient.

    After `jax.custom_vjp`.

    >>> import torch
    >>> @custom_vjp
    ... def clip_gradient(x, limit):
    ...     return x
    >>> def fwd(x, limit):
    ...     return x, limit
    >>> def bwd(limit, ct):
    ...     return ct.clamp(-limit, limit), None
    >>> clip_gradient.defvjp(fwd, bwd)
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> (clip_gradient(x, 3.0) * torch.tensor([2.0, 5.0])).sum().backward()
    >>> x.grad
    tensor([2., 3.])
    """

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: int | Sequence[int] = ()) -> None:
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(fun, name):
                setattr(self, name, getattr(fun, name))
        self.__wrapped__ = self.fun = fun
        self._signature = Signature(fun, nondiff_argnums)
        self.nondiff_argnums = self._signature.nondiff_argnums
        self._rules: _Rules | None = None

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Set the rules.

        Args:
            fwd: takes the arguments; gives a pair of the result and residuals, any tree.
            bwd: takes arguments that are not differentiated, residuals and the cotangents of the
                result, in its structure, zeros where there is none; gives a tuple with a tree for
                each other argument, in which `None` stands for zeros.
            symbolic_zeros: give `fwd` each leaf as a `CustomVJPPrimal`, with whether it is
                differentiated, and `bwd` a `SymbolicZero` for each cotangent that is zero.
            optimize_remat: in a checkpoint let `fun` compute the result, so that `fwd` runs only
                where its residuals are needed, in the backward pass if they are not saved.
        """
        self._rules = _Rules(fwd, bwd, symbolic_zeros, optimize_remat)

    def __repr__(self) -> str:
        return f"custom_vjp({name_of(self.fun)})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self._rules is None:
            raise MissingRuleError(
                f"No VJP defined for custom_vjp function {name_of(self.fun)} using defvjp."
            )
        call = _VjpCall(self.fun, self._rules, self._signature.resolve(args, kwargs))
        rule = VjpRule(name_of(self.fun), call.primal, call.fwd, call.bwd)
        outputs = CustomVjpCall.apply(rule, *call.arguments.tensors)
        assert call.out_structure is not None, "the function has run"
        return put_together(call.out_structure, outputs)


@dataclass(frozen=True)
class _Rules:
    fwd: Callable[..., Any]
    bwd: Callable[..., Any]
    symbolic_zeros: bool
    optimize_remat: bool


@dataclass(frozen=True, eq=False)
class _Rest:
    """What the way back must know besides the values of the residuals."""

    residuals: Structure
    outputs: Structure
    out_leaves: tuple[Any, ...]
    inputs: tuple[Aval, ...]


@dataclass(eq=False)
class _VjpCall:
    """One call: the function and its rules as functions of flat tensors."""

    fun: Callable[..., Any]
    rules: _Rules
    arguments: RuleArguments
    out_structure: Structure | None = field(default=None, init=False)

    def primal(self, inputs: Tensors) -> list[Tensor]:
        """The function itself."""
        result = self.fun(*self.arguments.all(inputs))
        self.out_structure, outputs = take_apart(result)
        return outputs

    def fwd(
        self, inputs: Tensors, perturbed: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor], _Rest]:
        """The forward rule: outputs, residuals, and the rest."""
        given = self._fwd_arguments(inputs, perturbed)
        pair = self.rules.fwd(*given)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RuleTypeError(self._no_pair(f"instead the fwd rule output was {outline(pair)}"))
        result, residuals = pair
        in_trace = _torch.innermost_proxy_mode() is not None
        if self.rules.optimize_remat and in_trace and not is_traced_whole():
            result = self.fun(*self.arguments.all(inputs))
        self.out_structure, outputs = take_apart(result)
        structure, values = take_apart(residuals)
        leaves = tuple(map(aval_of_value, _torch.tree_flatten(result)[0]))
        rest = _Rest(structure, self.out_structure, leaves, tuple(map(Aval.of, inputs)))
        return outputs, values, rest

    def _fwd_arguments(self, inputs: Tensors, perturbed: Sequence[bool]) -> tuple[Any, ...]:
        if not self.rules.symbolic_zeros:
            return self.arguments.all(inputs)
        flags = iter(perturbed)
        wrapped = [CustomVJPPrimal(t, perturbed=next(flags)) for t in inputs]
        args = self.arguments
        nondiff = {i: a for i, a in enumerate(args.args) if i in args.nondiff_argnums}
        found = _torch.tree_map(
            lambda leaf: (
                leaf if isinstance(leaf, CustomVJPPrimal) else CustomVJPPrimal(leaf, False)
            ),
            args.others(wrapped),
        )
        others = iter(found)
        return tuple(nondiff[i] if i in nondiff else next(others) for i in range(len(args.args)))

    def _no_pair(self, but: str) -> str:
        name, fwd = name_of(self.fun), name_of(self.rules.fwd)
        return (
            f"Custom VJP fwd rule {fwd} for function {name} must produce a pair (list or tuple of "
            "length two) where the first element represents the primal output (equal to the output "
            f"of the custom_vjp-decorated function {name}) and the second element represents "
            "residuals (i.e. values stored from the forward pass for use on the backward pass), "
            f"but {but}"
        )

    def bwd(self, rest: _Rest, residuals: Tensors, cotangents: Cotangents) -> list[Tensor | None]:
        """The backward rule: a cotangent for each tensor among the arguments."""
        symbolic = self.rules.symbolic_zeros
        given = iter(cotangents)
        leaves = [
            _zero_like(aval, symbolic) if not isinstance(aval, Aval) or (ct := next(given)) is None
            else ct
            for aval in rest.out_leaves
        ]  # fmt: skip
        ct = _torch.tree_unflatten(leaves, _torch.tree_flatten(rest.outputs.tree)[1])
        kept = put_together(rest.residuals, residuals)
        result = self.rules.bwd(*self.arguments.nondiff, kept, ct)
        return self._checked(result, rest)

    def _checked(self, result: Any, rest: _Rest) -> list[Tensor | None]:
        """What `bwd` gives, for each tensor among the arguments."""
        tree = self.arguments.structure.tree
        if isinstance(result, list) and len(result) == len(tree):
            result = tuple(result)
        try:
            if result is None:
                raise ValueError("None stands for an argument, not for all")
            leaves = leaves_up_to(result, tree)
        except ValueError:
            raise RuleTypeError(
                "Custom VJP bwd rule must produce an output with the same container (pytree) "
                "structure as the args tuple of the primal function, and in particular must "
                "produce a tuple of length equal to the number of arguments to the primal "
                f"function, but got bwd output structure {outline(result)} for primal input "
                f"structure {tree}. The rule is {name_of(self.rules.bwd)} of "
                f"{name_of(self.fun)}; None stands for an argument that gets no cotangent."
            ) from None
        are_tensors = holes_of(self.arguments.structure)
        found = [leaf for leaf, is_tensor in zip(leaves, are_tensors, strict=True) if is_tensor]
        paths = self.arguments.structure.paths()
        return [
            self._cotangent(value, aval, path)
            for value, aval, path in zip(found, rest.inputs, paths, strict=True)
        ]

    def _cotangent(self, value: Any, aval: Aval, path: Any) -> Tensor | None:
        if value is None or isinstance(value, SymbolicZero):
            return None
        if not (aval.dtype.is_floating_point or aval.dtype.is_complex):
            return None
        if isinstance(value, int | float | complex) and not aval.shape:
            return torch.tensor(value, dtype=aval.dtype, device=aval.device)
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape != aval.shape or value.dtype != aval.dtype:
            raise RuleValueError(
                "Custom VJP bwd rule must produce an output with the same shape/dtypes as the args "
                f"tuple of the primal function, but at output{_torch.keystr(path)} the bwd rule "
                f"produced an output of shape/dtype {aval_of_value(value)} corresponding to an "
                f"input of shape/dtype {aval}. The rule is {name_of(self.rules.bwd)} of "
                f"{name_of(self.fun)}"
            )
        return value  # type: ignore[no-any-return]


def _zero_like(aval: Any, symbolic: bool) -> Any:
    """A cotangent of zero for an output, given its aval, or the Python value that it is."""
    if not isinstance(aval, Aval):
        return zero_of(aval, symbolic=symbolic)
    if not (aval.dtype.is_floating_point or aval.dtype.is_complex):
        return None
    zero = SymbolicZero(aval)
    return zero if symbolic else zero.instantiate()

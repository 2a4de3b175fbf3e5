"""`custom_vjp`: a function with a rule of its own for reverse mode."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.core.trees import Structure
from torchremat.derivatives.custom_function import CustomFunction, FlatCall
from torchremat.derivatives.linear_parts import Tensors
from torchremat.derivatives.rule_arguments import (
    aval_of_value,
    describe_tree,
    flatten_tensors,
    flatten_up_to,
    mark_tensors,
    name_of,
    unflatten_tensors,
)
from torchremat.derivatives.rule_dispatch import CustomVjpCall, uncompiled
from torchremat.derivatives.rules import Cotangents, VjpRule
from torchremat.derivatives.symbolic_zeros import CustomVJPPrimal, SymbolicZero, zero_of
from torchremat.errors import MissingRuleError, RuleTypeError, RuleValueError
from torchremat.remat.op.make_graph import is_traced_whole


class custom_vjp(CustomFunction):  # noqa: N801 (JAX's name, used as a decorator)
    """A function whose derivative in reverse mode is given by rules.

        out, residuals = fwd(*args)         the function, and what `bwd` needs
        cotangents = bwd(residuals, ct)     a tuple, one entry an argument

    Where nothing is differentiated `fun` runs; else `fwd`. Derivatives of higher order
    differentiate the rules themselves. Under `vmap` the rules are mapped, and cotangents of an
    argument that all examples share are summed. Inside a checkpoint the policy sees the operators
    in them. In a graph a call is one `function_p`, whose rules survive. Nothing is conjugated:
    `bwd` multiplies with the transpose of the Jacobian. Forward mode raises `TypeError`.

    Under plain autograd a derivative of the backward pass runs `fwd` a second time. The arguments
    are therefore saved too if a floating-point residual is neither an argument nor an output.

    Args:
        fun: a function of trees of tensors and Python values. It is called with positional
            arguments; keywords and defaults are resolved by its signature.
        nondiff_argnums: positions of arguments that are any Python values (functions, say). `fwd`
            takes them in their places, `bwd` first.
        nondiff_argnames: names of more such arguments.

    Raises:
        ValueError: if `nondiff_argnames` names no parameter that can be given by position.
        AttributeError: if it is called before `defvjp`.
        TypeError: by a call, if a rule gives no result of the right structure, or in forward
            mode.
        RuleValueError: (a `ValueError`) by a call, if a rule gives tensors of the wrong shape or
            dtype.
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

    def __init__(
        self,
        fun: Callable[..., Any],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Iterable[str] = (),
    ) -> None:
        super().__init__(fun, nondiff_argnums, nondiff_argnames)
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
                result. These have its structure, with zeros where there is none. It gives a tuple
                with a tree for each other argument, in which `None` stands for zeros.
            symbolic_zeros: give `fwd` each leaf as a `CustomVJPPrimal`, with whether it is
                differentiated, and `bwd` a `SymbolicZero` for each cotangent that is zero.
            optimize_remat: in a checkpoint let `fun` compute the result. Then `fwd` runs only
                where its residuals are needed: in the backward pass if they are not saved.
        """
        self._rules = _Rules(fwd, bwd, symbolic_zeros, optimize_remat)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rules is None:
            raise MissingRuleError(
                f"No VJP defined for custom_vjp function {name_of(self.fun)} using defvjp."
            )
        call = _VjpCall(self.fun, self._signature.resolve(args, kwargs), self._rules)
        rule = VjpRule(name_of(self.fun), call.primal, call.fwd, call.bwd)
        return call.apply(CustomVjpCall, rule)


@dataclass(frozen=True)
class _Rules:
    fwd: Callable[..., Any]
    bwd: Callable[..., Any]
    symbolic_zeros: bool
    optimize_remat: bool


@dataclass(frozen=True, eq=False)
class _Rest:
    """The part of the residuals that is not a tensor, and the avals of outputs and inputs.

    A leaf of the result that is not a tensor stands among `outputs` itself.
    """

    residuals: Structure
    out_spec: _torch.TreeSpec
    outputs: tuple[Any, ...]
    inputs: tuple[Aval, ...]


@dataclass(eq=False)
class _VjpCall(FlatCall):
    rules: _Rules

    def fwd(
        self, inputs: Tensors, perturbed: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor], _Rest]:
        """Return outputs, residuals, and what else `bwd` needs."""
        pair = self.rules.fwd(*self._fwd_arguments(inputs, perturbed))
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            name, fwd = name_of(self.fun), name_of(self.rules.fwd)
            raise RuleTypeError(
                f"Custom VJP fwd rule {fwd} for function {name} must produce a pair (list or tuple "
                "of length two) where the first element represents the primal output (equal to the "
                f"output of the custom_vjp-decorated function {name}) and the second element "
                "represents residuals (i.e. values stored from the forward pass for use on the "
                f"backward pass), but instead the fwd rule output was {describe_tree(pair)}"
            )
        result, residuals = pair
        in_trace = _torch.innermost_proxy_mode() is not None
        if self.rules.optimize_remat and in_trace and not is_traced_whole():
            result = self.fun(*self.arguments.all(inputs))
        outputs = self.flatten_result(result)
        structure, values = flatten_tensors(residuals)
        leaves, spec = _torch.tree_flatten(result)
        avals = tuple(map(aval_of_value, leaves))
        return outputs, values, _Rest(structure, spec, avals, tuple(map(Aval.of, inputs)))

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

    def bwd(self, rest: _Rest, residuals: Tensors, cotangents: Cotangents) -> list[Tensor | None]:
        given = iter(cotangents)
        leaves = []
        for aval in rest.outputs:
            ct = next(given) if isinstance(aval, Aval) else None
            if ct is None:
                ct = zero_of(aval, symbolic=self.rules.symbolic_zeros)
            leaves.append(ct)
        result = self.rules.bwd(
            *self.arguments.nondiff,
            unflatten_tensors(rest.residuals, residuals),
            _torch.tree_unflatten(leaves, rest.out_spec),
        )
        return self._check_cotangents(result, rest)

    def _check_cotangents(self, result: Any, rest: _Rest) -> list[Tensor | None]:
        tree = self.arguments.structure.tree
        if isinstance(result, list) and len(result) == len(tree):
            result = tuple(result)
        try:
            if result is None:
                raise ValueError("None stands for an argument, not for all")
            leaves = flatten_up_to(result, tree)
        except ValueError:
            raise RuleTypeError(
                "Custom VJP bwd rule must produce an output with the same container (pytree) "
                "structure as the args tuple of the primal function: a tuple with an entry "
                "for each argument. Instead got bwd output structure "
                f"{describe_tree(result)} for primal input structure {tree}. The rule is "
                f"{name_of(self.rules.bwd)} of {name_of(self.fun)}; None stands for an argument "
                "that gets no cotangent."
            ) from None
        are_tensors = mark_tensors(self.arguments.structure)
        found = [leaf for leaf, is_tensor in zip(leaves, are_tensors, strict=True) if is_tensor]
        paths = self.arguments.structure.paths()
        return [
            self._check_cotangent(value, aval, path)
            for value, aval, path in zip(found, rest.inputs, paths, strict=True)
        ]

    def _check_cotangent(self, value: Any, aval: Aval, path: Any) -> Tensor | None:
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
                f"tuple of the primal function: at output{_torch.keystr(path)} the bwd rule "
                f"produced an output of shape/dtype {aval_of_value(value)} corresponding to an "
                f"input of shape/dtype {aval}. The rule is "
                f"{name_of(self.rules.bwd)} of {name_of(self.fun)}"
            )
        return value  # type: ignore[no-any-return]

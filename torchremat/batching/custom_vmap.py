import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import StaticArguments, flatten_axes
from torchremat.batching.axis_positions import broadcast, moveaxis
from torchremat.core.interrupts import hold_interrupts
from torchremat.core.source import name_of
from torchremat.core.trees import scatter_values
from torchremat.errors import ArgumentTypeError, MissingRuleError, RuleError
from torchremat.graph.aliasing import spread
from torchremat.graph.notes import note
from torchremat.policies.builtin import plain_autograd
from torchremat.remat.checkpointed import Checkpointed
from torchremat.remat.tracing.calls import flatten_call
from torchremat.tracing.tracing import current_tracing

_log = logging.getLogger("torchremat")

VmapRule = Callable[..., tuple[Any, Any]]


class custom_vmap:  # noqa: N801 (a decorator)
    """A function of trees of tensors with a rule of its own for `vmap`.

    The rule, given to `def_vmap`, is called as `rule(axis_size, in_batched, *args)`. An argument
    has the mapped axis in front where `in_batched`, a tree of bools like the arguments, says so.
    The rule returns the outputs, and a tree prefix of bools: which of them have the axis in front.
    Under a `vmap` that wraps a derivative (`vmap(grad(f))`) the derivative of the rule is used.
    Outside `vmap` the function runs as it is.

    Raises:
        MissingRuleError: (an `AttributeError`) at the call, if there is no rule.
        RuleError: (a `ValueError`) at the call under `vmap`, if the rule gives no such pair, or
            an output without the axis that it says there is. Also if it gives another tree than
            the function, which is traced once to know; what cannot be traced may have any rule.

    After `jax.custom_batching.custom_vmap`.

    >>> import torch, torchremat as tr
    >>> @custom_vmap
    ... def f(x, y):
    ...     return x + y
    >>> @f.def_vmap
    ... def rule(axis_size, in_batched, xs, ys):
    ...     print("rule for", axis_size, in_batched)
    ...     return xs + ys, True
    >>> tr.vmap(f, in_axes=(0, None))(torch.arange(3.0), torch.tensor(10.0))
    rule for 3 [True, False]
    tensor([10., 11., 12.])
    """

    def __init__(self, fun: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.rule: VmapRule | None = None
        self._structures: _Structures | None = _Structures(fun)

    def _find_structure(self, args: Sequence[Any]) -> _torch.TreeSpec | None:
        """The tree that the function returns for the example `args`; `None` if it is not known."""
        return None if self._structures is None else self._structures.find(tuple(args))

    def def_vmap(self, rule: VmapRule) -> VmapRule:
        """Give the rule; may be used as a decorator."""
        if not callable(rule):
            raise ArgumentTypeError(f"def_vmap takes a function, but it was given {rule!r}")
        self.rule = rule
        return rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self.rule is None:
            raise MissingRuleError(
                "No batching rule defined for custom_vmap function "
                f"{getattr(self.fun, '__name__', self.fun)} using def_vmap. Give it one: "
                "@f.def_vmap above rule(axis_size, in_batched, *args)."
            )
        if kwargs:
            args = _bind_arguments(self.fun, args, kwargs)
        leaves, spec = _torch.tree_flatten(list(args))
        call = _UserCall(self, self.rule, spec)
        outputs = _VmapRuleCall.apply(call, *leaves)  # type: ignore[no-untyped-call]
        return _torch.tree_unflatten(list(outputs), call.out_spec)


def sequential_vmap(fun: Callable[..., Any]) -> custom_vmap:
    """A `custom_vmap` whose rule calls `fun` for one example after the other.

    For what PyTorch cannot map, and what must not be: an operator of a library, a solver whose
    number of steps differs.

    After `jax.custom_batching.sequential_vmap`.

    >>> import torch, torchremat as tr
    >>> @sequential_vmap
    ... def f(x):
    ...     print("called")
    ...     return x * 2
    >>> tr.vmap(f)(torch.ones(2))
    called
    called
    tensor([2., 2.])
    """
    mapped = custom_vmap(fun)
    mapped._structures = None  # the rule returns what `fun` does

    def rule(axis_size: int, in_batched: list[Any], *args: Any) -> tuple[Any, Any]:
        leaves, spec = _torch.tree_flatten(list(args))
        flags = _torch.tree_flatten(in_batched)[0]
        results = []
        for i in range(axis_size):
            example = [x[i] if b else x for x, b in zip(leaves, flags, strict=True)]
            results.append(fun(*_torch.tree_unflatten(example, spec)))
        columns = zip(*(_torch.tree_flatten(result)[0] for result in results), strict=True)
        out_spec = _torch.tree_flatten(results[0])[1]
        stacked = [torch.stack([torch.as_tensor(x) for x in column]) for column in columns]
        return _torch.tree_unflatten(stacked, out_spec), True

    mapped.def_vmap(rule)
    return mapped


class _Structures:
    """The trees that a function returns, as its traces tell."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        statics = StaticArguments(fun, (), (), lenient=True)
        self._traced = Checkpointed(fun, plain_autograd, True, statics, lenient=True)
        self._unknown: set[Any] = set()

    def find(self, args: tuple[Any, ...]) -> _torch.TreeSpec | None:
        traced = self._traced
        call = flatten_call(args, {}, traced.statics, lenient=True)
        if call.key in self._unknown:
            return None
        with hold_interrupts(), _torch.dispatch_restored():
            try:
                return traced.trace_of(call, args, {}).result.spec
            except Exception as error:  # it needs values, or calls another library
                _log.debug("the outputs of %s are unknown: %s", name_of(traced.fun), error)
        self._unknown.add(call.key)
        return None


def _is_inexact(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


class _FlatCall(ABC):
    @abstractmethod
    def run(self, *leaves: Any) -> tuple[Any, ...]:
        """The outputs."""

    @abstractmethod
    def run_rule(
        self, axis_size: int, batched: tuple[bool, ...], *leaves: Any
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """The outputs by the rule, and which of them have the axis in front."""


class _UserCall(_FlatCall):
    """The user's function; after a run `out_spec` is the structure of the outputs."""

    def __init__(self, of: custom_vmap, rule: VmapRule, spec: _torch.TreeSpec) -> None:
        self.of = of
        self.rule = rule
        self.spec = spec
        self.out_spec: Any = None

    def run(self, *leaves: Any) -> tuple[Any, ...]:
        result = self.of.fun(*_torch.tree_unflatten(list(leaves), self.spec))
        outputs, self.out_spec = _torch.tree_flatten(result)
        return tuple(outputs)

    def run_rule(
        self, axis_size: int, batched: tuple[bool, ...], *leaves: Any
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        args = _torch.tree_unflatten(list(leaves), self.spec)
        given = self.rule(axis_size, _torch.tree_unflatten(list(batched), self.spec), *args)
        if not isinstance(given, tuple) or len(given) != 2:
            raise RuleError(
                f"the batching rule of {name_of(self.of.fun)} must return a pair: the outputs, and "
                f"which of them are batched. It returned {given!r}"
            )
        outputs, self.out_spec = _torch.tree_flatten(given[0])
        try:
            flags = flatten_axes("out_batched", self.out_spec, given[1])
        except ValueError as error:
            raise RuleError(
                "structure of output value and output batching specification returned by custom "
                f"vmap rule ({getattr(self.rule, '__name__', self.rule)}) do not match. {error}"
            ) from error
        self._check_structure(batched, leaves)
        for output, flag in zip(outputs, flags, strict=True):
            self._check(output, flag, axis_size)
        return tuple(outputs), tuple(flags)

    def _check_structure(self, batched: tuple[bool, ...], leaves: tuple[Any, ...]) -> None:
        example = [_first_example(x) if b else x for x, b in zip(leaves, batched, strict=True)]
        expected = self.of._find_structure(_torch.tree_unflatten(example, self.spec))
        if expected is not None and expected != self.out_spec:
            raise RuleError(
                "structure of output returned by custom vmap rule "
                f"({getattr(self.rule, '__name__', self.rule)}) does not match that of original "
                f"custom-vmapped function, {name_of(self.of.fun)}. Original output: {expected}. "
                f"Rule output: {self.out_spec}"
            )

    def _check(self, output: Any, flag: Any, axis_size: int) -> None:
        shape = tuple(output.shape) if isinstance(output, Tensor) else ()
        if flag and shape[:1] != (axis_size,):
            raise RuleError(
                f"the batching rule of {name_of(self.of.fun)} says that an output is batched, but "
                f"it has no axis of size {axis_size} in front: its shape is {shape}"
            )


def _first_example(x: Tensor) -> Tensor:
    return x.select(0, 0) if x.shape[0] else x.new_empty(x.shape[1:])


@dataclass(frozen=True)
class _RuleDerivative(_FlatCall):
    """It takes the leaves of `of`, then tangents of those at `wrt` or cotangents of the outputs."""

    of: _FlatCall
    num_leaves: int
    wrt: tuple[int, ...]
    is_forward: bool

    def run(self, *values: Any) -> tuple[Any, ...]:
        leaves, given = list(values[: self.num_leaves]), values[self.num_leaves :]
        return self._derive(self.of.run, leaves, given)

    def run_rule(
        self, axis_size: int, batched: tuple[bool, ...], *values: Any
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        # each example has a derivative of its own, also with respect to what all share
        values = tuple(
            x if flag or not isinstance(x, Tensor) else broadcast(x, axis_size, 0).contiguous()
            for x, flag in zip(values, batched, strict=True)
        )
        leaves, given = list(values[: self.num_leaves]), values[self.num_leaves :]
        flags = tuple(isinstance(x, Tensor) for x in leaves)

        def rule(*leaves: Any) -> tuple[Any, ...]:
            outputs, has_axis = self.of.run_rule(axis_size, flags, *leaves)
            pairs = zip(outputs, has_axis, strict=True)
            return tuple(x if flag else broadcast(x, axis_size, 0) for x, flag in pairs)

        found = self._derive(rule, leaves, given)
        return found, (True,) * len(found)

    def _derive(
        self, function: Callable[..., tuple[Any, ...]], leaves: list[Any], given: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        def of_some(*values: Tensor) -> tuple[Any, ...]:
            filled = list(leaves)
            for i, value in zip(self.wrt, values, strict=True):
                filled[i] = value
            return tuple(x for x in function(*filled) if _is_inexact(x))

        primals = tuple(leaves[i] for i in self.wrt)
        if self.is_forward:
            return tuple(torch.func.jvp(of_some, primals, given)[1])
        return tuple(torch.func.vjp(of_some, *primals)[1](given))


@contextmanager
def _note_reruns() -> Iterator[None]:
    """Note that derivatives run these operators again, so that their inputs are saved."""
    tracing = current_tracing()
    num_nodes = 0 if tracing is None else len(tracing.graph.nodes)
    yield
    if tracing is not None:
        for node in islice(tracing.graph.nodes, num_nodes, None):
            note(node, is_rerun=True)


class _VmapRuleCall(torch.autograd.Function):
    """A flat call as PyTorch's levels see it: its derivatives are its own, `vmap` is the rule."""

    @staticmethod
    def forward(call: _FlatCall, *leaves: Any) -> tuple[Any, ...]:
        with _note_reruns():
            return tuple(map(spread, _as_views(call.run(*leaves), leaves)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.call, *leaves = inputs
        ctx.others = [None if isinstance(x, Tensor) else (x,) for x in leaves]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.inexact = tuple(i for i, x in enumerate(output) if _is_inexact(x))
        ctx.num_outputs = len(output)
        ctx.mark_non_differentiable(
            *(x for x in output if isinstance(x, Tensor) and not _is_inexact(x))
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        wrt = tuple(i for i, _ in enumerate(ctx.others) if ctx.needs_input_grad[i + 1])
        cotangents = tuple(cotangents[i] for i in ctx.inexact)
        grads: list[Any] = [None] * len(ctx.others)
        for i, grad in zip(
            wrt, _apply_derivative(ctx, wrt, cotangents, is_forward=False), strict=True
        ):
            grads[i] = grad
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> tuple[Any, ...]:
        wrt = tuple(i for i, t in enumerate(tangents) if t is not None)
        found = _apply_derivative(ctx, wrt, [tangents[i] for i in wrt], is_forward=True)
        return tuple(scatter_values(found, ctx.inexact, ctx.num_outputs))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _FlatCall, *leaves: Any) -> Any:
        dims = in_dims[1:]
        moved = [
            x if dim is None else moveaxis(x, dim, 0) for x, dim in zip(leaves, dims, strict=True)
        ]
        outputs, flags = call.run_rule(info.batch_size, tuple(d is not None for d in dims), *moved)
        return _as_views(outputs, moved), tuple(0 if flag else None for flag in flags)


def _as_views(outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Make a view of each output that is an input: autograd forbids both."""
    given = {id(x) for x in inputs if isinstance(x, Tensor)}
    return tuple(x.view_as(x) if id(x) in given else x for x in outputs)


def _apply_derivative(
    ctx: Any, wrt: tuple[int, ...], given: Any, *, is_forward: bool
) -> tuple[Any, ...]:
    tensors = iter(ctx.saved_tensors)
    leaves = [next(tensors) if other is None else other[0] for other in ctx.others]
    derivative = _RuleDerivative(ctx.call, len(leaves), wrt, is_forward)
    return _VmapRuleCall.apply(derivative, *leaves, *given)  # type: ignore[no-untyped-call,no-any-return]


def _bind_arguments(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Bind all arguments by position: the rule takes none by keyword."""
    bound = inspect.signature(fun).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise RuleError(
            f"a custom_vmap function takes no keyword-only arguments, but {name_of(fun)} was called"
            f" with {sorted(bound.kwargs)}: its rule has no place for them"
        )
    return bound.args

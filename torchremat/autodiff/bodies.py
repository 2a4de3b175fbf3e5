"""Functions of flat tensors that can be traced again at every order of differentiation.

A graph of ATen operators has lost what `autograd.Function`, `no_grad` and `detach` mean for
derivatives. So each transformation transforms the *function* with PyTorch's own autograd and
`torch.func`, and traces last. A `Body` is such a function; its transformations are bodies too:

    body            x            -> y
    vjp of body     x, ct        -> ct' = vjp(body, x)(ct)
    vjp of that     x, ct, ct2   -> ...
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.errors import NotAvailableError
from torchremat.graph.nodes import VIEWS_BY_SHAPE
from torchremat.graph.notes import notes_of
from torchremat.graph.ops import draws_by_shape
from torchremat.graph.symbolic_sizes import Interpreter
from torchremat.tracing.ambient_state import AmbientState
from torchremat.tracing.axes.mapped_functions import run_mapped
from torchremat.tracing.axes.mapped_operators import let_vmap_decompose, let_vmap_scatter
from torchremat.tracing.axes.named_axes import AxisName
from torchremat.tracing.dtensors import CotangentPlacements, Sharding, wrap_local
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.tracing import Tracing
from torchremat.tracing.value_guards import ValueGuards

FlatFunction = Callable[[list[Tensor]], list[Any]]


class Body(ABC):
    """A function from a list of tensors to a list of outputs, for use inside a trace."""

    num_escaped = 0
    """How many of the last outputs it does not return but leaves elsewhere, in a list say."""
    num_checks = 0
    """How many of those, at the end, tell whether checks of the function hold."""

    @abstractmethod
    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs for `inputs`, tensors of `tracing` or wrapped ones."""


class FunctionBody(Body):
    """A Python function, with the tensors that it closes over as further inputs.

    The first trace, in which `inputs` are the arguments alone, finds the tensors that it closes
    over. `captured` returns them. A caller that knows where they come from replaces it by a
    function that returns the current ones, which a later trace reads. Branches on masks are
    errors unless there are `value_guards`. Libraries find no fake tensors if there is a list
    `asked_for_fakes` for their files.
    """

    def __init__(
        self,
        get_function: Callable[[], FlatFunction],
        args: Sequence[InputSpec],
        value_guards: ValueGuards | None = None,
        asked_for_fakes: list[str] | None = None,
    ) -> None:
        self.asked_for_fakes = asked_for_fakes
        self.get_function = get_function
        self.value_guards = value_guards
        self.num_args = len(args)
        self.shardings: list[Sharding | None] = [spec.sharding for spec in args]
        self.cotangent_placements = CotangentPlacements()
        self.state = AmbientState.now()
        self.captured: Callable[[], Sequence[Tensor]] | None = None

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        hidden = _torch.hide_fakes(self.asked_for_fakes)
        with self.state.restore(), tracing.use_value_guards(self.value_guards), hidden:
            inputs = self._wrap_inputs(inputs)
            args = list(inputs[: self.num_args])
            if self.captured is None:
                tracing.cotangent_placements = self.cotangent_placements
                outputs = [tracing.lift(value) for value in self.get_function()(args)]
                found = list(tracing.captured)
                self.captured = lambda: found
                self.shardings += [spec.sharding for spec in tracing.captured_specs]
                return outputs
            with tracing.bind_captured(self.captured(), inputs[self.num_args :]):
                return [tracing.lift(value) for value in self.get_function()(args)]

    def _wrap_inputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            return [
                wrap_local(tensor, sharding, number, self.cotangent_placements)
                for number, (tensor, sharding) in enumerate(
                    zip(inputs, self.shardings, strict=True)
                )
            ]


@dataclass(frozen=True, eq=False)
class GraphBody(Body):
    """The function that runs a graph. Its constants stay constants."""

    module: fx.GraphModule

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        return list(_GraphInterpreter(self.module, tracing).run(*inputs))


class _OperatorInterpreter(Interpreter):
    """Runs a graph with operators that PyTorch differentiates and maps in the place of others."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.copy.default:  # PyTorch maps it by a loop
            return _copy(*args)
        if target is _torch.ZERO_TENSOR:
            # a product with it has a tangent of another layout, which views of the product refuse
            target = torch.ops.aten.zeros.default
        elif target in VIEWS_BY_SHAPE:
            # `x.contiguous()` is not an operator where x was contiguous, and mapped it may not be
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


class _GraphInterpreter(_OperatorInterpreter):
    """Unlike `Interpreter`, it leaves constants constants: they are no further inputs."""

    def __init__(self, module: fx.GraphModule, tracing: Tracing) -> None:
        super().__init__(module)
        self.tracing = tracing

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.tracing.constant(value) if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; `index_fill` in a form that PyTorch maps over an axis correctly."""
        if target is torch.ops.aten.index_fill.int_Tensor:
            # vmap gives the fill value of the last example to all if only that value is mapped
            x, dim, index, value = args
            shape = [*x.shape[:dim], *index.shape[:1], *x.shape[dim + 1 :]]
            target, args = torch.ops.aten.index_copy.default, (x, dim, index, value.expand(shape))
        if draws_by_shape(target):
            # the numbers of one example, which vmap draws for all or for each
            args = _torch.tree_map(_empty_like_example, args)
        return super().call_function(target, args, kwargs)


def _copy(x: Tensor, source: Tensor, *_: Any) -> Tensor:
    """The values of `copy`, which functionalisation makes of `copy_`, with a derivative."""
    return source.to(x.device, x.dtype).expand(x.shape).clone()


def _empty_like_example(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_contiguous():
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


@dataclass(frozen=True, eq=False)
class VjpBody(Body):
    """The vector-Jacobian product of `of`: its inputs, then cotangents, to cotangents of inputs.

    `wrt` are the positions of the inputs that are differentiated, `outputs` those of the outputs
    that have a cotangent.
    """

    of: Body
    num_inputs: int
    wrt: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        primals, cotangents = inputs[: self.num_inputs], inputs[self.num_inputs :]
        if _torch.functorch_is_active():
            return self._run_functionally(tracing, primals, cotangents)
        with torch.enable_grad():
            primals = [
                differentiable(p) if i in self.wrt else p.detach() for i, p in enumerate(primals)
            ]
            outputs = self._run_once(tracing, primals)
            wrt = [primals[i] for i in self.wrt]
            found = gradients(
                [outputs[i] for i in self.outputs], wrt, cotangents, create_graph=True
            )
            # there is one for each without create_graph, where a rule may give zeros
            pairs = zip(wrt, found, strict=True)
            return [torch.zeros_like(x) if g is None else g for x, g in pairs]

    def _run_functionally(
        self, tracing: Tracing, primals: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> list[Any]:
        def function(*wrt: Tensor) -> tuple[Any, ...]:
            values = list(primals)
            for i, value in zip(self.wrt, wrt, strict=True):
                values[i] = value
            outputs = self._run_once(tracing, values)
            return tuple(outputs[i] for i in self.outputs)

        pull_back = torch.func.vjp(function, *(primals[i] for i in self.wrt))[1]
        return list(pull_back(tuple(cotangents)))

    def _run_once(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        """Run the function. Its derivative is traced so only if it is differentiated itself."""
        outputs = self.of.run(tracing, inputs)
        for node in tracing.graph.nodes:
            if node.target in _WITHOUT_SECOND_DERIVATIVE:
                raise NotAvailableError(
                    f"a second derivative of a checkpoint needs that of torch's {node.target}, at "
                    f"{notes_of(node).source}. PyTorch has none: it takes the first derivative for "
                    "a constant. Call it outside of what is differentiated twice, or choose "
                    "between values with torch.where."
                )
        return outputs


# PyTorch 2.13 returns gradients of these that require none themselves, also with create_graph
_WITHOUT_SECOND_DERIVATIVE = {
    getattr(torch.ops.higher_order, name)
    for name in ("cond", "map_impl", "scan", "while_loop", "associative_scan")
    if hasattr(torch.ops.higher_order, name)
}


@dataclass(frozen=True, eq=False)
class JvpBody(Body):
    """The Jacobian-vector product of `of`: its inputs, then tangents, to tangents of outputs.

    `wrt` are the positions of the inputs that have a tangent, `outputs` those of the outputs whose
    tangents are wanted. With `keep_primals`, the outputs themselves come first.
    """

    of: Body
    num_inputs: int
    wrt: tuple[int, ...]
    outputs: tuple[int, ...]
    keep_primals: bool = False

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        primals, tangents = inputs[: self.num_inputs], inputs[self.num_inputs :]

        constants: list[Any] = []

        def function(*wrt: Tensor) -> tuple[tuple[Any, ...], Any]:
            values = list(primals)
            for i, value in zip(self.wrt, wrt, strict=True):
                values[i] = value
            outputs = self.of.run(tracing, values)
            constants[:] = [None if isinstance(o, Tensor) else (o,) for o in outputs]
            tensors = [o for o in outputs if isinstance(o, Tensor)]  # torch.func takes no others
            return tuple(outputs[i] for i in self.outputs), tensors

        _, out_tangents, tensors = torch.func.jvp(  # type: ignore[misc]
            function, tuple(primals[i] for i in self.wrt), tuple(tangents), has_aux=True
        )
        if not self.keep_primals:
            return list(out_tangents)
        left = iter(tensors)
        return [*(next(left) if c is None else c[0] for c in constants), *out_tangents]


@dataclass(eq=False)
class BatchedBody(Body):
    """`of` mapped over an axis of some inputs (`in_dims`, `None` where there is none).

    After a run `out_dims` holds where the axis is in each output: 0, or `None` for one that does
    not vary.
    """

    of: Body
    in_dims: tuple[int | None, ...]
    axis_size: int
    randomness: str
    name: AxisName = None
    out_dims: tuple[int | None, ...] = ()

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        def function(*values: Tensor) -> tuple[Any, ...]:
            return tuple(self.of.run(tracing, values))

        let_vmap_scatter()
        let_vmap_decompose()
        outputs, out_dims = run_mapped(
            function, self.in_dims, self.axis_size, self.randomness, self.name
        )(*inputs)
        moved = [
            torch.movedim(output, dim, 0) if dim else output
            for output, dim in zip(outputs, out_dims, strict=True)
        ]
        self.out_dims = tuple(None if dim is None else 0 for dim in out_dims)
        return moved


def differentiable(tensor: Tensor) -> Tensor:
    """`tensor`, or a new leaf with its values where it requires no gradient."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def gradients(
    outputs: Sequence[Any],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    create_graph: bool,
) -> list[Tensor | None]:
    """The gradients of `inputs`, of their shapes; `None` where no output depends on the input."""
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if isinstance(output, Tensor) and output.requires_grad
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    return list(
        _torch.run_backward(
            tuple(output for output, _ in pairs),
            tuple(inputs),
            tuple(cotangent for _, cotangent in pairs),
            create_graph=create_graph,
        )
    )


class NotedInterpreter(_OperatorInterpreter):
    """Runs a graph in a trace. Operators pass their notes on to those that they become."""

    def __init__(self, module: fx.GraphModule, tracing: Tracing) -> None:
        super().__init__(module)
        self.tracing = tracing

    def run_node(self, n: fx.Node) -> Any:
        self.tracing.node_notes = replace(notes_of(n), phase=self.tracing.phase)
        try:
            return super().run_node(n)
        finally:
            self.tracing.node_notes = None


@dataclass(frozen=True, eq=False)
class NotedBody(Body):
    """The function that runs a graph, whose operators pass on their module and source line."""

    module: fx.GraphModule

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        return list(NotedInterpreter(self.module, tracing).run(*inputs))

"""The graph of one element of a batch: sizes that differ are symbols in it.

It is traced as `make_graph` traces, once for all lengths. Where the function asks for the value of
an integer tensor (`torch.arange(n)`), it gets a symbol too.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import TraceOptions, trace_joint
from torchremat.batching.ragged.layouts.ragged_sizes import reading
from torchremat.batching.ragged.rules.attention import KeptAttention
from torchremat.batching.ragged.trace.decompositions import BreakingUp
from torchremat.batching.ragged.trace.trace_errors import explain_mismatches, refusing_branches
from torchremat.errors import RaggedError
from torchremat.graph.notes import notes_of
from torchremat.graph.symbolic_sizes import format_size, literal_size
from torchremat.remat.tracing.guards import CapturedTensors, ModuleGuard, VariableGuard
from torchremat.remat.tracing.variables import modules_in, variables_of, variables_of_modules
from torchremat.tracing.ambient_state import AmbientState
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.no_grad_op import mark_no_grad

aten = torch.ops.aten
_HINT = 1_000_003
"""What a size is while its graph is traced: a large prime, so that no other is equal to it."""


@dataclass(frozen=True)
class ElementSpec:
    """What an input is like for one element.

    A size that differs is the number of its symbol, below 0: `(-1, 5, -1)` has one size in two
    dims, `(-1, -2)` two sizes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True, eq=False)
class ElementGraph:
    """The graph of one element.

    `symbols` names those of the inputs, in the order of their numbers. `items` has the symbols that
    stand for values of tensors, with the nodes of these. `captured` gives the tensors that
    the function closes over, which are inputs after the others.
    """

    module: fx.GraphModule
    outputs: tuple[Any, ...]
    symbols: tuple[str, ...]
    items: dict[str, fx.Node]
    captured: CapturedTensors
    captured_specs: tuple[InputSpec, ...]
    has_extra_input: bool
    """Whether there is an input after the others that nothing reads."""
    guards: tuple[Any, ...] = ()

    def closed_over(self) -> list[Tensor] | None:
        """What the function closes over now; `None` if what the trace took for granted changed."""
        if not all(guard.holds() for guard in self.guards):
            return None
        tensors = self.captured.current()
        if tensors is None or not all(isinstance(t, Tensor) for t in tensors):
            return None
        specs = tuple(InputSpec.of(t, any_level=True) for t in tensors)
        return tensors if specs == self.captured_specs else None


class _Lowering(BreakingUp):
    """Breaks up operators, and gives a symbol to who asks for the value of an integer."""

    def __init__(self, shapes: _torch.ShapeEnv) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes
        self.found: list[tuple[torch.SymInt, Tensor]] = []
        self.gave_numbers = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.size.default:  # code in C++ that knows no symbols
            return self._numbers_for_sizes(args[0])
        if func is aten._local_scalar_dense.default:
            return self._read(func, *args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _numbers_for_sizes(self, tensor: Tensor) -> list[int]:
        """Numbers to compare sizes with; `refuse_numbers` sees to it that the graph has none."""
        self.gave_numbers |= any(isinstance(size, torch.SymInt) for size in tensor.shape)
        return [_torch.hint_of(size) for size in tensor.shape]

    def refuse_numbers(self, graph: fx.Graph) -> None:
        """Raise if an operator was given a number for a size that differs."""
        for node in graph.nodes if self.gave_numbers else ():
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, Tensor) else ()
            if any(map(_is_made_of_hints, [*_literals(node.args), *sizes])):
                raise RaggedError(
                    f"an operator of PyTorch, called at {notes_of(node).source}, has no form for "
                    f"sizes that differ from element to element ({node.target} is given one as a "
                    "number). Write it with other operators, or map over a dense batch."
                )

    def _read(self, func: Any, tensor: Tensor) -> Any:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            return func(tensor)
        for size, known in self.found:
            if known is tensor:
                return size
        number = len(self.found)
        size = _torch.new_symbol(self.shapes, _HINT * 2 + 2 * number, f"item_{number}")
        mode = _torch.innermost_proxy_mode()
        assert mode is not None
        _torch.track_size(size, mode.tracer, _value_of_a_tensor)
        self.found.append((size, tensor))
        return size


def _literals(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _literals(item)
    else:
        yield value


def _is_made_of_hints(number: Any) -> bool:
    return type(number) is int and _HINT // 2 < abs(number) < sys.maxsize


def _value_of_a_tensor() -> None:
    """Stands in a trace for the value of a tensor, until the trace is finished."""


def trace_element(
    function: Callable[[Sequence[Tensor]], Sequence[Any]],
    specs: Sequence[ElementSpec],
    owner: Any,
) -> tuple[ElementGraph, list[Tensor]]:
    """Trace `function`, a function of flat tensors, for elements like `specs`.

    `owner` is the user's function, whose variables and modules are watched.
    """
    shapes = _torch.new_shape_env()
    symbols: dict[int, torch.SymInt] = {}
    inputs = [_input_spec(spec, shapes, symbols) for spec in specs]
    has_extra_input = not symbols
    if has_extra_input:  # a trace knows symbols if one of its inputs has one
        extra = ElementSpec((-1,), torch.float32, torch.device("cpu"), False)
        inputs.append(_input_spec(extra, shapes, {}))
    lowering = _Lowering(shapes)
    variables = variables_of(owner)
    roots = list(modules_in(variables))
    if isinstance(owner, torch.nn.Module):
        roots.insert(0, ("", owner))
    inside = list(dict.fromkeys(m for _, root in roots for m in root.modules()))
    unchanged = VariableGuard([*variables, *variables_of_modules(inside)])

    def flat(tensors: list[Tensor]) -> list[Any]:
        with KeptAttention(), lowering, refusing_branches(shapes), _symbols_for_values():
            outputs = list(function(tensors[: len(specs)]))
        return [*outputs, *(tensor for _, tensor in lowering.found)]

    paths = ModulePaths({})
    for name, module in roots:
        paths.add_root(module, name)
    body = FunctionBody(lambda: flat, inputs)
    names = [f"arg{i}" for i in range(len(inputs))]
    with torch.inference_mode(False), explain_mismatches([s.shape for s in specs], symbols):
        options = TraceOptions(
            with_gradients=False, whole_calls=True, grad_enabled=torch.is_grad_enabled()
        )
        joint, tracing = trace_joint(body, inputs, names, paths, options)
    if joint.mutations:
        raise RaggedError(
            "the mapped function writes in place to a tensor that it is given or closes over "
            f"(input {joint.mutations[0][0]}), which a ragged vmap does not do. Return the new "
            "value, or write to a copy (x.clone())."
        )
    lowering.refuse_numbers(joint.module.graph)
    mark_no_grad(joint.module.graph)
    unchanged.forget_changed()
    modules = dict.fromkeys([*inside, *paths.seen])
    named = [(paths.name_of(m) or "", m) for m in modules]
    count = len(lowering.found)
    results = joint.outputs
    outputs, read = (results[: len(results) - count], results[len(results) - count :])
    items = {format_size(size): node for (size, _), node in zip(lowering.found, read, strict=True)}
    order = sorted(symbols, reverse=True)
    graph = ElementGraph(
        joint.module,
        tuple(map(literal_size, outputs)),
        tuple(format_size(symbols[number]) for number in order),
        items,
        CapturedTensors(tracing.captured, variables, named),
        tuple(tracing.captured_specs),
        has_extra_input,
        (ModuleGuard(named), unchanged),
    )
    return graph, list(tracing.captured)


def _input_spec(
    spec: ElementSpec, shapes: _torch.ShapeEnv, symbols: dict[int, torch.SymInt]
) -> InputSpec:
    for number in spec.shape:
        if number < 0 and number not in symbols:
            symbols[number] = _torch.new_symbol(shapes, _HINT - 6 * number, f"size_{-number}")
    shape: tuple[Any, ...] = tuple(symbols[n] if n < 0 else n for n in spec.shape)
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return InputSpec(
        shape,
        tuple(strides),
        spec.dtype,
        spec.device,
        spec.requires_grad,
        is_leaf=True,
    )


@contextmanager
def _symbols_for_values() -> Iterator[None]:
    before, reading.gives_symbols = reading.gives_symbols, True
    try:
        yield
    finally:
        reading.gives_symbols = before


# --- the cache -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    specs: tuple[ElementSpec, ...]
    key: Any
    grad_enabled: bool
    surroundings: AmbientState


_cache: "weakref.WeakKeyDictionary[Any, dict[_Key, list[ElementGraph]]]" = (
    weakref.WeakKeyDictionary()
)


def element_graph(
    function: Callable[[Sequence[Tensor]], Sequence[Any]],
    specs: Sequence[ElementSpec],
    owner: Any,
    key: Any,
) -> tuple[ElementGraph, list[Tensor]]:
    """The graph of one element, traced now if there is none of such a call; what it closes over."""
    full_key = _Key(tuple(specs), key, torch.is_grad_enabled(), AmbientState.now())
    try:
        graphs = _cache.setdefault(owner, {}).setdefault(full_key, [])
    except TypeError:  # some callables cannot be referred to weakly, some keys not be hashed
        graphs = []
    for graph in graphs:
        tensors = graph.closed_over()
        if tensors is not None:
            return graph, tensors
    graph, tensors = trace_element(function, specs, owner)
    graphs.insert(0, graph)
    del graphs[8:]
    return graph, tensors

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
from torchremat.autodiff.joint import Joint, TraceOptions, trace_joint
from torchremat.batching.ragged.layouts.ragged_sizes import read_mode
from torchremat.batching.ragged.rules.attention import AttentionMode
from torchremat.batching.ragged.trace.decompositions import DecomposeMode
from torchremat.batching.ragged.trace.element_errors import explain_mismatches, refuse_branches
from torchremat.errors import RaggedError
from torchremat.graph.notes import notes_of
from torchremat.graph.symbolic_sizes import format_size, literal_size
from torchremat.remat.tracing.guards import CapturedTensors, ModuleGuard, VariableGuard
from torchremat.remat.tracing.variables import modules_in, variables_of, variables_of_modules
from torchremat.tracing.ambient_state import AmbientState
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.no_grad_op import mark_no_grad
from torchremat.tracing.tracing import Tracing

aten = torch.ops.aten
_HINT = 1_000_003
"""The hint of a size while its graph is traced: a large prime, so that no other is equal."""


@dataclass(frozen=True)
class ElementSpec:
    """A size that differs is the number of its symbol, below 0: `(-1, 5, -1)` has one size in two
    dims, `(-1, -2)` two sizes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True, eq=False)
class ElementGraph:
    """`symbols` names those of the inputs, in the order of their numbers. `items` has the symbols
    that stand for values of tensors, with the nodes of these. `captured` gives the tensors that
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

    def find_captured(self) -> list[Tensor] | None:
        """The tensors that the function closes over now; `None` if a guard fails."""
        if not all(guard.holds() for guard in self.guards):
            return None
        tensors = self.captured.current()
        if tensors is None or not all(isinstance(t, Tensor) for t in tensors):
            return None
        specs = tuple(InputSpec.of(t, any_level=True) for t in tensors)
        return tensors if specs == self.captured_specs else None


class _ElementMode(DecomposeMode):
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
        size = _torch.new_symbol(
            self.shapes, _HINT * 2 + 2 * number, f"item_{number}", watched=True
        )
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
    function: Callable[[Sequence[Tensor]], Sequence[Any]], specs: Sequence[ElementSpec], owner: Any
) -> tuple[ElementGraph, list[Tensor]]:
    """The guards of the graph are on the variables and modules of `owner`, the user's function."""
    shapes = _torch.new_shape_env()
    symbols: dict[int, torch.SymInt] = {}
    with _torch.isolate():  # a trace around would take strides, which are products, for its own
        inputs = [_make_input_spec(spec, shapes, symbols) for spec in specs]
        has_extra_input = not symbols
        if has_extra_input:  # a trace knows symbols if one of its inputs has one
            extra = ElementSpec((-1,), torch.float32, torch.device("cpu"), False)
            inputs.append(_make_input_spec(extra, shapes, {}))
    mode = _ElementMode(shapes)
    watched = _Watched.of(owner)

    def run(tensors: list[Tensor]) -> list[Any]:
        with AttentionMode(), mode, refuse_branches(shapes), _read_values_as_symbols():
            outputs = list(function(tensors[: len(specs)]))
        return [*outputs, *(tensor for _, tensor in mode.found)]

    with torch.inference_mode(False), explain_mismatches([s.shape for s in specs], symbols):
        joint, tracing = _trace(run, inputs, watched.paths)
    mode.refuse_numbers(joint.module.graph)
    mark_no_grad(joint.module.graph)
    captured, guards = watched.make_guards(tracing.captured)
    count = len(joint.outputs) - len(mode.found)
    found = zip(mode.found, joint.outputs[count:], strict=True)
    graph = ElementGraph(
        joint.module,
        tuple(map(literal_size, joint.outputs[:count])),
        tuple(format_size(symbols[number]) for number in sorted(symbols, reverse=True)),
        {format_size(size): node for (size, _), node in found},
        captured,
        tuple(tracing.captured_specs),
        has_extra_input,
        guards,
    )
    return graph, list(tracing.captured)


def _trace(
    run: Callable[[list[Tensor]], list[Any]], inputs: Sequence[InputSpec], paths: ModulePaths
) -> tuple[Joint, Tracing]:
    options = TraceOptions(
        with_gradients=False, whole_calls=True, grad_enabled=torch.is_grad_enabled()
    )
    names = [f"arg{i}" for i in range(len(inputs))]
    joint, tracing = trace_joint(FunctionBody(lambda: run, inputs), inputs, names, paths, options)
    if joint.mutations:
        raise RaggedError(
            "the mapped function writes in place to a tensor that it is given or closes over "
            f"(input {joint.mutations[0][0]}), which a ragged vmap does not do. Return the new "
            "value, or write to a copy (x.clone())."
        )
    return joint, tracing


@dataclass(frozen=True)
class _Watched:
    """The variables and modules that a function uses, noted before it is traced."""

    variables: Sequence[Any]
    modules: Sequence[torch.nn.Module]
    unchanged: VariableGuard
    paths: ModulePaths

    @classmethod
    def of(cls, owner: Any) -> "_Watched":
        variables = variables_of(owner)
        roots = list(modules_in(variables))
        if isinstance(owner, torch.nn.Module):
            roots.insert(0, ("", owner))
        modules = list(dict.fromkeys(m for _, root in roots for m in root.modules()))
        unchanged = VariableGuard([*variables, *variables_of_modules(modules)])
        paths = ModulePaths({})
        for name, module in roots:
            paths.add_root(module, name)
        return cls(variables, modules, unchanged, paths)

    def make_guards(self, captured: Sequence[Tensor]) -> tuple[CapturedTensors, tuple[Any, ...]]:
        self.unchanged.forget_changed()
        modules = dict.fromkeys([*self.modules, *self.paths.seen])
        named = [(self.paths.name_of(m) or "", m) for m in modules]
        return CapturedTensors(captured, self.variables, named), (
            ModuleGuard(named),
            self.unchanged,
        )


def _make_input_spec(
    spec: ElementSpec, shapes: _torch.ShapeEnv, symbols: dict[int, torch.SymInt]
) -> InputSpec:
    for number in spec.shape:
        if number < 0 and number not in symbols:
            symbols[number] = _torch.new_symbol(
                shapes, _HINT - 6 * number, f"size_{-number}", watched=True
            )
    shape: tuple[Any, ...] = tuple(symbols[n] if n < 0 else n for n in spec.shape)
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return InputSpec(
        shape, tuple(strides), spec.dtype, spec.device, spec.requires_grad, is_leaf=True
    )


@contextmanager
def _read_values_as_symbols() -> Iterator[None]:
    before, read_mode.gives_symbols = read_mode.gives_symbols, True
    try:
        yield
    finally:
        read_mode.gives_symbols = before


@dataclass(frozen=True)
class _Key:
    specs: tuple[ElementSpec, ...]
    key: Any
    grad_enabled: bool
    surroundings: AmbientState


_cache: "weakref.WeakKeyDictionary[Any, dict[_Key, list[ElementGraph]]]" = (
    weakref.WeakKeyDictionary()
)


def find_element_graph(
    function: Callable[[Sequence[Tensor]], Sequence[Any]],
    specs: Sequence[ElementSpec],
    owner: Any,
    key: Any,
) -> tuple[ElementGraph, list[Tensor]]:
    full_key = _Key(tuple(specs), key, torch.is_grad_enabled(), AmbientState.now())
    try:
        graphs = _cache.setdefault(owner, {}).setdefault(full_key, [])
    except TypeError:  # some callables take no weak references, some keys have no hash
        graphs = []
    for graph in graphs:
        tensors = graph.find_captured()
        if tensors is not None:
            return graph, tensors
    graph, tensors = trace_element(function, specs, owner)
    graphs.insert(0, graph)
    del graphs[8:]
    return graph, tensors

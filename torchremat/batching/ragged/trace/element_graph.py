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
from torchremat.batching.ragged.trace.element_errors import explain_mismatches
from torchremat.batching.ragged.trace.size_answers import (
    Answers,
    Lengths,
    SizeQuestions,
    UnansweredError,
)
from torchremat.batching.ragged.trace.size_functions import SizeMode
from torchremat.core.source import current_source
from torchremat.errors import RaggedError
from torchremat.graph.symbolic_sizes import format_size, literal_size
from torchremat.remat.escapes.escapes import Escapes
from torchremat.remat.tracing.guards.captured_tensors import CapturedTensors
from torchremat.remat.tracing.guards.module_guard import ModuleGuard
from torchremat.remat.tracing.guards.variable_guard import VariableGuard
from torchremat.remat.tracing.guards.variables import modules_in, variables_of, variables_of_modules
from torchremat.tracing.ambient_state import AmbientState
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.no_grad_op import mark_no_grad
from torchremat.tracing.tracing import Tracing, use_symbols

aten = torch.ops.aten
_HINT = 1_000_003
"""The hint of a size while its graph is traced: a large prime, so that no other is equal. It only
answers questions of PyTorch that have the same answer for all sizes from 2 on."""


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
    assumed: tuple[tuple[Any, Any], ...] = ()
    """Questions about sizes of the inputs, with the answer that all elements give."""
    assumed_of_values: tuple[tuple[Any, Any], ...] = ()
    """Questions about `items`, to be checked when these have values."""

    def find_captured(self, lengths: Sequence[Tensor], answers: Answers) -> list[Tensor] | None:
        """The tensors that the function closes over now; `None` if a guard fails."""
        if not all(guard.holds() for guard in self.guards):
            return None
        given = Lengths(dict(zip(self.symbols, lengths, strict=True)), answers)
        if not all(given.find_answer(q) == answer for q, answer in self.assumed):
            return None
        tensors = self.captured.current()
        if tensors is None or not all(isinstance(t, Tensor) for t in tensors):
            return None
        specs = tuple(InputSpec.of(t, any_level=True) for t in tensors)
        return tensors if specs == self.captured_specs else None


class _ElementMode(DecomposeMode):
    def __init__(self, shapes: _torch.AskingShapeEnv) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes
        self.found: list[tuple[torch.SymInt, Tensor]] = []
        self.sizes_given: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.size.default:  # code in C++ that knows no symbols
            return self._numbers_for_sizes(args[0])
        if func is aten._local_scalar_dense.default:
            return self._read(func, *args)
        if self.sizes_given:
            args, kwargs = _map_numbers(lambda x: self._as_size(x, func), (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _numbers_for_sizes(self, tensor: Tensor) -> list[int]:
        """Numbers to compare sizes with; where one comes back it is the size again."""
        numbers = []
        sizes: Sequence[Any] = tensor.shape
        for size in sizes:
            hint = _torch.hint_of(size)
            if not _is_made_of_hints(hint):
                hint = int(size)
            elif self.sizes_given.setdefault(hint, size).node.expr != size.node.expr:
                raise RaggedError(f"two sizes look the same ({size}), at {current_source()}")
            numbers.append(hint)
        return numbers

    def _as_size(self, number: Any, func: Any) -> Any:
        if not _is_made_of_hints(number):
            return number
        if number in self.sizes_given:
            return self.sizes_given[number]
        raise RaggedError(
            f"an operator of PyTorch, called at {current_source()}, has no form for sizes that "
            f"differ from element to element ({func} is given one as a number). Write it with "
            "other operators, or map over a dense batch."
        )

    def _read(self, func: Any, tensor: Tensor) -> Any:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            return func(tensor)
        for size, known in self.found:
            if known is tensor:
                return size
        number = len(self.found)
        hint = _HINT * 2 + 2 * number
        size = self.shapes.new_size(hint, f"item_{number}", may_be_negative=True)
        mode = _torch.innermost_proxy_mode()
        assert mode is not None
        _torch.track_size(size, mode.tracer, _value_of_a_tensor)
        self.found.append((size, tensor))
        return size


def _map_numbers(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_map_numbers(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _map_numbers(function, item) for key, item in value.items()}
    return function(value)


def _is_made_of_hints(number: Any) -> bool:
    return type(number) is int and _HINT // 2 < abs(number) < sys.maxsize


def _value_of_a_tensor() -> None:
    """Stands in a trace for the value of a tensor, until the trace is finished."""


def trace_element(
    function: Callable[[Sequence[Tensor]], Sequence[Any]],
    specs: Sequence[ElementSpec],
    owner: Any,
    lengths: Sequence[Tensor],
    answers: Answers,
) -> tuple[ElementGraph, list[Tensor]]:
    """The guards of the graph are on the variables and modules of `owner`, the user's function."""
    questions = SizeQuestions()
    shapes = questions.shapes
    inputs, symbols = _make_inputs(specs, shapes)
    names = tuple(format_size(symbols[number]) for number in sorted(symbols, reverse=True))
    questions.lengths = Lengths(dict(zip(names, lengths, strict=True)), answers)
    mode = _ElementMode(shapes)
    watched = _Watched.of(owner)

    def run(tensors: list[Tensor]) -> list[Any]:
        with _run_as_element(mode):
            outputs = list(function(tensors[: len(specs)]))
        return [*outputs, *(tensor for _, tensor in mode.found)]

    with _explain_errors(specs, symbols), use_symbols(shapes):
        joint, tracing = _trace(run, inputs, watched.paths)
        questions.finish()
    mark_no_grad(joint.module.graph)
    captured, guards = watched.make_guards(tracing.captured)
    count = len(joint.outputs) - len(mode.found)
    found = zip(mode.found, joint.outputs[count:], strict=True)
    graph = ElementGraph(
        joint.module,
        tuple(map(literal_size, joint.outputs[:count])),
        names,
        {format_size(size): node for (size, _), node in found},
        captured,
        tuple(tracing.captured_specs),
        not symbols,
        guards,
        tuple(questions.assumed.items()),
        tuple(questions.assumed_of_values.items()),
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
        unchanged = VariableGuard([*variables, *variables_of_modules(modules, owner)])
        paths = ModulePaths({})
        for name, module in roots:
            paths.add_root(module, name)
        return cls(variables, modules, unchanged, paths)

    def make_guards(self, captured: Sequence[Tensor]) -> tuple[CapturedTensors, tuple[Any, ...]]:
        nothing = Escapes()  # what a function of one element leaves behind is not carried out
        self.unchanged.forget_changed(nothing)
        modules = dict.fromkeys([*self.modules, *self.paths.seen])
        named = [(self.paths.name_of(m) or "", m) for m in modules]
        return CapturedTensors(captured, self.variables, named, nothing, writes=False), (
            ModuleGuard(named, nothing, captured),
            self.unchanged,
        )


@contextmanager
def _explain_errors(
    specs: Sequence[ElementSpec], symbols: dict[int, torch.SymInt]
) -> Iterator[None]:
    with torch.inference_mode(False), explain_mismatches([s.shape for s in specs], symbols):
        yield


def _make_inputs(
    specs: Sequence[ElementSpec], shapes: _torch.AskingShapeEnv
) -> tuple[list[InputSpec], dict[int, torch.SymInt]]:
    symbols: dict[int, torch.SymInt] = {}
    with _torch.isolate():  # a trace around would take strides, which are products, for its own
        inputs = [_make_input_spec(spec, shapes, symbols) for spec in specs]
        if not symbols:  # a trace knows symbols if one of its inputs has one
            extra = ElementSpec((-1,), torch.float32, torch.device("cpu"), False)
            inputs.append(_make_input_spec(extra, shapes, {}))
    return inputs, symbols


def _make_input_spec(
    spec: ElementSpec, shapes: _torch.AskingShapeEnv, symbols: dict[int, torch.SymInt]
) -> InputSpec:
    for number in spec.shape:
        if number < 0 and number not in symbols:
            symbols[number] = shapes.new_size(_HINT - 6 * number, f"size_{-number}")
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
def _run_as_element(mode: _ElementMode) -> Iterator[None]:
    before, read_mode.gives_symbols = read_mode.gives_symbols, True
    try:
        with _torch.symbolic_lengths(), AttentionMode(), SizeMode(), mode:
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
    lengths: Sequence[Tensor],
) -> tuple[ElementGraph, list[Tensor]]:
    """Find a graph that holds for elements of these `lengths`, one for each size that differs."""
    full_key = _Key(tuple(specs), key, torch.is_grad_enabled(), AmbientState.now())
    try:
        graphs = _cache.setdefault(owner, {}).setdefault(full_key, [])
    except TypeError:  # some callables take no weak references, some keys have no hash
        graphs = []
    answers: Answers = {}
    for graph in graphs:
        tensors = graph.find_captured(lengths, answers)
        if tensors is not None:
            return graph, tensors
    graph, tensors = _trace_with_answers(function, specs, owner, lengths, answers)
    graphs.insert(0, graph)
    del graphs[8:]
    return graph, tensors


def _trace_with_answers(
    function: Callable[[Sequence[Tensor]], Sequence[Any]],
    specs: Sequence[ElementSpec],
    owner: Any,
    lengths: Sequence[Tensor],
    answers: Answers,
) -> tuple[ElementGraph, list[Tensor]]:
    while True:
        try:
            return trace_element(function, specs, owner, lengths, answers)
        except UnansweredError as error:
            error.lengths.ask_trace_around(error.question)

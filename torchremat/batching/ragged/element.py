"""The graph of one element of a batch: sizes that differ are symbols in it.

It is traced as `make_graph` traces, once for all lengths. Where the function asks for the value of
an integer tensor (`torch.arange(n)`), it gets a symbol too.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import TraceOptions, trace_joint
from torchremat.batching.ragged.attention import KeptAttention
from torchremat.batching.ragged.lowering import decomposition
from torchremat.errors import RaggedError, TorchrematError
from torchremat.graph.modules import ModulePaths
from torchremat.graph.no_grad import mark_no_grad
from torchremat.graph.sizes import literal_size, printed
from torchremat.graph.sources import Source, current_source, is_user_file, source_of_error
from torchremat.graph.surroundings import Surroundings
from torchremat.graph.tracing import InputSpec
from torchremat.remat.guards import (
    CapturedTensors,
    ModuleGuard,
    VariableGuard,
    modules_in,
    variables_of,
    variables_of_modules,
)

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


class _Lowering(_torch.TorchDispatchMode):
    """Breaks up operators without a rule, and gives a symbol to who asks for an integer's value."""

    supports_higher_order_operators = True

    def __init__(self, shapes: _torch.ShapeEnv) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes
        self.found: list[tuple[torch.SymInt, Tensor]] = []
        self.gave_numbers = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.size.default:  # code in C++ that knows no symbols
            return self._numbers_for_sizes(args[0])
        if func is aten._local_scalar_dense.default:
            return self._read(func, *args)
        broken_up = decomposition(func, args)
        if broken_up is None:
            return func(*args, **kwargs)
        with self:
            return broken_up(*args, **kwargs)

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
                    f"an operator of PyTorch, called at {node.meta.get('source')}, has no form for "
                    f"sizes that differ from element to element ({node.target} is given one as a "
                    "number). Write it with other operators, or map over a dense batch."
                )

    def _read(self, func: Any, tensor: Tensor) -> Any:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            return func(tensor)
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
        with KeptAttention(), lowering, _refusing_branches(shapes):
            outputs = list(function(tensors[: len(specs)]))
        return [*outputs, *(tensor for _, tensor in lowering.found)]

    paths = ModulePaths({})
    for name, module in roots:
        paths.add_root(module, name)
    body = FunctionBody(lambda: flat, len(inputs))
    names = [f"arg{i}" for i in range(len(inputs))]
    with torch.inference_mode(False), _explained_mismatches(specs, symbols):
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
    items = {printed(size): node for (size, _), node in zip(lowering.found, read, strict=True)}
    order = sorted(symbols, reverse=True)
    graph = ElementGraph(
        joint.module,
        tuple(map(literal_size, outputs)),
        tuple(printed(symbols[number]) for number in order),
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
def _explained_mismatches(
    specs: Sequence[ElementSpec], symbols: dict[int, torch.SymInt]
) -> Iterator[None]:
    """Say whose sizes they are that an operator finds not to fit."""
    try:
        yield
    except RuntimeError as error:
        names = {printed(size): number for number, size in symbols.items()}
        met = [name for name in names if name in str(error)]
        if isinstance(error, TorchrematError) or not met:
            raise
        places = "; ".join(
            f"{name} is the size of dim {spec.shape.index(names[name])} of input {i}"
            for name in met
            for i, spec in enumerate(specs)
            if names[name] in spec.shape
        )
        raise RaggedError(
            f"sizes that differ from element to element do not fit at {source_of_error(error)}: "
            f"{error} Here {places}. Two sizes are one if their lengths are equal in all elements."
        ) from error


@contextmanager
def _refusing_branches(shapes: _torch.ShapeEnv) -> Iterator[None]:
    """Raise where the user's own Python code needs a size that differs as a number.

    PyTorch's code, which asks for much, is answered as for a large size.
    """
    evaluate = shapes.evaluate_sym_node

    def checked(node: Any, *args: Any, **kwargs: Any) -> Any:
        if not node.expr.free_symbols:
            return evaluate(node, *args, **kwargs)
        source = _user_who_asks()
        if source is None and node.pytype is int:
            raise RaggedError(
                f"an operator of PyTorch, called at {current_source()}, needs a size as a number "
                f"that differs from element to element ({node.expr}): it has no form for such. Use "
                "other operators, or map over a dense batch."
            )
        if source is not None:
            raise RaggedError(
                f"Python needs the value of a size that differs from element to element, at "
                f"{source} (of {node.expr}): an `if`, `int` or `range` of it has one answer in the "
                "graph of all elements. Use operators of tensors: torch.where, torch.arange(n), "
                "x[:k] with a number k."
            )
        return evaluate(node, *args, **kwargs)

    shapes.evaluate_sym_node = checked  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del shapes.evaluate_sym_node


_SYMBOLS_OF_TORCH = tuple(
    os.path.join(os.path.dirname(torch.__file__), *place)
    for place in (("__init__.py",), ("fx", "experimental"))
)


_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__", "__round__", "__trunc__")


def _user_who_asks() -> Source | None:
    """The line of the user's that needs the value of a size; none if PyTorch's code does."""
    frame: FrameType | None = sys._getframe(2)
    asked = ""
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLS_OF_TORCH):
        asked = frame.f_code.co_name
        frame = frame.f_back
    if frame is None or asked not in _CONVERSIONS or not is_user_file(frame.f_code.co_filename):
        return None
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


# --- the cache -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    specs: tuple[ElementSpec, ...]
    key: Any
    grad_enabled: bool
    surroundings: Surroundings


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
    full_key = _Key(tuple(specs), key, torch.is_grad_enabled(), Surroundings.now())
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

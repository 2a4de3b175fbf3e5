"""From a Python function of tensors to a graph of ATen operators.

A `Tracing` is one run of a function on fake tensors whose operators are recorded. It differs from
`make_fx` in three ways. Inputs may be added while it runs: tensors that the function closes over,
and the cotangents of its outputs, become inputs when they are met. Each node knows the user's line,
the module that ran it and its phase. `torch.func` levels and dispatch modes around do not leak in.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointFunction

from torchremat import _torch
from torchremat.core.interrupts import hold_interrupts
from torchremat.core.source import current_source
from torchremat.errors import TraceError
from torchremat.graph.notes import Notes, note, set_notes
from torchremat.graph.symbolic_sizes import sizes_as_literals, track_from_elsewhere
from torchremat.tracing.ambient_state import gpu_stood_for, without_autocast
from torchremat.tracing.axes.named_axes import out_of_reach
from torchremat.tracing.capture import CaptureMode, map_arguments
from torchremat.tracing.checks.checks import Checks
from torchremat.tracing.dtensors import CotangentPlacements, wrap_local
from torchremat.tracing.dynamic_inputs import shapes_of
from torchremat.tracing.error_messages import explain_errors
from torchremat.tracing.inner_checkpoints import CallOnly
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.modules.reached_code import note_frames
from torchremat.tracing.value_guards import ValueGuards, question_of_operator


def _new_tracer(tracing: "Tracing") -> _torch.PythonKeyTracer:
    """A tracer that notes phase, module and source line on each node it writes."""
    tracer = _torch.new_tracer()
    create_node = tracer.create_node

    def create_noted_node(*args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(*args, **kwargs)
        if tracing.on_node is not None:
            tracing.on_node(node)
        if tracing.node_notes is not None:
            set_notes(node, tracing.node_notes.from_trace())
        else:
            note_frames()
            module, source = tracing.paths.current, current_source()
            gpu = gpu_stood_for()
            notes = Notes(tracing.phase, module, source, tracing.grad_enabled)
            set_notes(node, notes if gpu is None else replace(notes, stands_for=gpu.kind))
        return node

    tracer.create_node = create_noted_node  # type: ignore[method-assign]
    return tracer


trace_lock = threading.RLock()
"""Lets one thread trace at a time: PyTorch's own tracing keeps state that threads share."""


class _InProgress(threading.local):
    def __init__(self) -> None:
        self.tracings: list[Tracing] = []
        self.shapes: list[_torch.AskingShapeEnv] = []


_in_progress = _InProgress()


def lift_all(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors` as the innermost trace in progress in this thread sees them, if there is one."""
    tracings = _in_progress.tracings
    return [tracings[-1].lift(t) for t in tensors] if tracings else tensors


@contextmanager
def use_symbols(shapes: "_torch.AskingShapeEnv") -> Iterator[None]:
    """Let traces in the block know these symbols, which a function may close over."""
    _in_progress.shapes.append(shapes)
    try:
        yield
    finally:
        _in_progress.shapes.pop()


def shapes_around() -> "_torch.AskingShapeEnv | None":
    return _in_progress.shapes[-1] if _in_progress.shapes else None


def has_symbols(specs: Sequence[InputSpec]) -> bool:
    """Whether sizes of inputs are symbols of the trace around, so that no other call has them.

    Where there is such a trace, a function may also close over tensors of such sizes.
    """
    return shapes_of(specs) is not None or shapes_around() is not None


def _symbols_of(shapes: "_torch.ShapeEnv | None") -> Sequence[torch.SymInt]:
    return shapes.symbols if isinstance(shapes, _torch.AskingShapeEnv) else ()


def current_tracing() -> "Tracing | None":
    """The trace whose graph an operator that runs now is written into.

    There is none outside traces, and none where the body of a `torch.cond` or its kin is traced.
    """
    mode = _torch.innermost_proxy_mode()
    tracings = _in_progress.tracings
    if mode is None or not tracings or mode.tracer is not tracings[-1].tracer:
        return None
    return tracings[-1]


@dataclass(eq=False)
class Tracing:
    """One trace in progress; `graph` is complete once `finish` has run."""

    paths: ModulePaths = field(default_factory=lambda: ModulePaths({}))
    captured: list[Tensor] = field(default_factory=list)
    captured_inputs: list[Tensor] = field(default_factory=list)
    captured_specs: list[InputSpec] = field(default_factory=list)
    cotangent_placements: CotangentPlacements = field(default_factory=CotangentPlacements)
    may_capture: bool = True
    warns: bool = False
    shapes: _torch.ShapeEnv | None = None
    phase: str = "forward"
    node_notes: Notes | None = None
    opens_calls: bool = False
    on_function: Callable[[type, tuple[Any, ...], Callable[..., Any]], Any] | None = None
    """Handles a call of a user's `autograd.Function`: class, arguments, `apply`."""
    on_own_backward: Callable[[type], None] | None = None
    """Is called with each `autograd.Function` of a user, before it runs."""
    runs_own_backward: bool = False
    """Whether one was called."""
    on_checkpoint: _torch.CheckpointHandler | None = None
    """Handles a call of `torch.utils.checkpoint`. `None`: only its function is called."""
    value_guards: ValueGuards | None = None
    checks: Checks | None = None
    """Takes the conditions of branches that else only raise. `None`: those are errors too."""
    on_node: Callable[[fx.Node], None] | None = None
    """Is called with each node that is written."""

    def __post_init__(self) -> None:
        self._call_checkpoint = self.on_checkpoint or CallOnly(self.warns)
        self.shapes = self.shapes or shapes_around()
        self.tracer = _new_tracer(self)
        self.fake_mode = _torch.new_fake_mode(self.shapes)
        self._capture_mode = CaptureMode(self.tracer, self.lift, partial(_answer_branch, self))
        self._last_placeholder: fx.Node | None = None
        self.placeholders: dict[int, fx.Node] = {}
        self.bindings: list[Mapping[int, Tensor]] = [{}]
        self._outer_grad_mode: bool | None = None
        self._refusal: TraceError | None = None

    @property
    def grad_enabled(self) -> bool:
        """Grad mode, as the user's code sees it that calls an `autograd.Function`."""
        outer = self._outer_grad_mode
        return torch.is_grad_enabled() if outer is None else outer

    @contextmanager
    def keep_grad_mode(self) -> Iterator[None]:
        """Note operators in the block with the grad mode of now, whatever it is set to."""
        outer, self._outer_grad_mode = self._outer_grad_mode, self.grad_enabled
        try:
            yield
        finally:
            self._outer_grad_mode = outer

    def note_loop(self, operator: str) -> None:
        """Note on operators written so far, of that name (`aten::histc`), that a loop ran them."""
        for node in self.graph.nodes:
            if isinstance(node.target, _torch.OpOverload) and node.target.name() == operator:
                note(node, is_looped=True)

    @property
    def graph(self) -> fx.Graph:
        return self.tracer.graph

    @contextmanager
    def recording(self) -> Iterator[None]:
        _torch.let_modes_see_views_of_zeros()
        with ExitStack() as stack:
            stack.enter_context(hold_interrupts())  # first, so that all else is left before
            stack.enter_context(trace_lock)
            stack.enter_context(out_of_reach())
            stack.enter_context(_torch.isolate())
            stack.enter_context(_torch.set_saved_tensors_hooks_aside())
            stack.enter_context(_torch.set_module_trackers_aside())
            stack.enter_context(without_autocast())
            stack.enter_context(self.paths.recording())
            stack.enter_context(self._capture_mode)
            stack.enter_context(_torch.handle_function_calls(self._call_function))
            stack.enter_context(_torch.handle_checkpoints(self._call_checkpoint))
            stack.enter_context(_torch.lift_before_wrapping(self.lift))
            stack.enter_context(_torch.enter_proxy_modes(self.tracer, self.fake_mode))
            stack.enter_context(torch.autograd.grad_mode.set_multithreading_enabled(False))
            stack.enter_context(_torch.replay_views())
            stack.enter_context(_torch.answer_nan_checks())
            stack.enter_context(_torch.answer_operators(self.fake_mode, partial(_answer, self)))
            stack.enter_context(explain_errors(lambda: self._refusal))
            for size in _symbols_of(self.shapes):  # the function may have read some outside
                track_from_elsewhere(size, self.tracer)
            _in_progress.tracings.append(self)
            stack.callback(_in_progress.tracings.pop)
            yield

    def input(self, spec: InputSpec, name: str) -> Tensor:
        with self.pause_recording():
            fake = spec.empty()
        graph = self.graph
        after = self._last_placeholder
        taken = {node.target for node in self.placeholders.values()}
        while name in taken:
            name += "_"
        where = graph.inserting_before(None) if after is None else graph.inserting_after(after)
        with where:
            proxy = self.tracer.create_proxy("placeholder", name, (), {})
        self._last_placeholder = proxy.node
        self.placeholders[id(fake)] = proxy.node
        _torch.track(fake, proxy, self.tracer)
        return fake

    def alias_input(self, fake: Tensor, spec: InputSpec) -> Tensor:
        """One more fake tensor that stands for the input that `fake` stands for."""
        with self.pause_recording(), torch.no_grad():
            twin = spec.empty().detach()
        proxy = fx.Proxy(self.placeholder_of(fake), self.tracer)
        _torch.track(twin, proxy, self.tracer)
        return twin

    def constant(self, value: Tensor) -> Tensor:
        """A tensor of the outside world that becomes part of the graph, as a `get_attr`."""
        name = self.tracer.get_fresh_qualname("_tensor_constant")
        setattr(self.tracer.root, name, value)
        with _torch.without_function_modes():
            proxy = self.tracer.create_proxy("get_attr", name, (), {})
        with self.pause_recording():
            fake = self.fake_mode.from_tensor(value)
        _torch.track(fake, proxy, self.tracer)
        return fake

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Make fake tensors in the block; no operator is recorded."""
        # a tensor that is first met in inference mode may be used outside it too
        with _torch.isolate(), torch.inference_mode(False), self.fake_mode:
            yield

    @contextmanager
    def bind_captured(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Iterator[None]:
        """While in the block, each of the captured `tensors` stands for one of `inputs`.

        Where no level of torch.func is active it does so later too: rules read what they close over
        in the backward pass.
        """
        self.bindings.append({id(t): i for t, i in zip(tensors, inputs, strict=True)})
        try:
            yield
        finally:
            bound = self.bindings.pop()
            if len(self.bindings) == 1 and not _torch.functorch_is_active():
                self.bindings[0] = {**self.bindings[0], **bound}

    def lift(self, tensor: Tensor) -> Tensor:
        """The tensor of this trace that stands for `tensor`, which may be of the outside world."""
        if not isinstance(tensor, Tensor):
            return tensor
        bound = self.bindings[-1].get(id(tensor))
        if bound is not None:
            return bound
        if not _is_foreign(tensor, self.fake_mode):
            return tensor
        return self._capture(tensor)

    def placeholder_of(self, fake: Tensor) -> fx.Node:
        """The placeholder that `input` made for `fake`, which may have been written to since."""
        return self.placeholders[id(fake)]

    @contextmanager
    def use_value_guards(self, value_guards: ValueGuards | None) -> Iterator[None]:
        before, self.value_guards = self.value_guards, value_guards
        if value_guards is not None:
            value_guards.begin()
        try:
            yield
        finally:
            self.value_guards = before

    def truth_of(self, tensor: Tensor) -> bool | None:
        if self.value_guards is None:
            return None
        inputs = list(self.placeholders.values())
        node = self.node_of(tensor)
        if node in inputs:
            node = self.node_of(tensor.clone())  # fx compiles no graph without an operator
        return self.value_guards.truth_of(node, self.tracer.root, inputs, self.captured)

    def evaluate(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> bool | None:
        """The truth value that `module` computes from tensors of this trace, if it is known."""
        with _below_levels(self):
            (value,) = module(*map(self.lift, inputs))
        return self.truth_of(value)

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        proxy = _torch.proxy_of(tensor, self.tracer)
        return None if proxy is None else proxy.node

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        nodes = []
        for value in outputs:
            node = self.node_of(self.lift(value)) if isinstance(value, Tensor) else value
            assert node is not None or value is None, f"an output is not tracked: {value!r}"
            nodes.append(node)
        self.graph.output(tuple(nodes))
        _torch.erase_questions(self.graph)
        if self.shapes is not None:
            sizes_as_literals(self.graph)
        _erase_shape_checks(self.graph)
        return fx.GraphModule(self.tracer.root, self.graph)

    def _call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        with self.keep_grad_mode():
            is_active = _torch.is_active(self._capture_mode)
            if not is_active and _has_fake_of_other_trace(args, self.fake_mode):
                return apply(*args)  # Dynamo runs, on fake tensors of its own
            args = tuple(map_arguments(self.lift, args))
            if cls is CheckpointFunction:
                function, _preserves_rng_state, *inputs = args
                return self._call_checkpoint(function, tuple(inputs), {}, None)
            if _torch.is_function_of_user(cls):
                self.runs_own_backward = True
                if self.on_own_backward is not None:
                    self.on_own_backward(cls)
                if self.on_function is not None:
                    return self.on_function(cls, args, apply)
            return apply(*args)

    def _capture(self, tensor: Tensor) -> Tensor:
        known = self.bindings[0].get(id(tensor))
        if known is not None:
            return known
        assert self.may_capture, "a graph that is traced again closes over nothing"
        name = f"captured_{len(self.captured)}"
        try:
            spec = InputSpec.of(tensor, any_level=True)
        except TraceError as error:
            self._refusal = error  # operators of Python (`x @ w`) hide a `TypeError`
            raise
        fake = self.input(spec, name)
        self.captured.append(tensor)
        self.captured_inputs.append(fake)
        self.captured_specs.append(spec)
        number = len(self.placeholders) - 1
        with torch.enable_grad():
            whole = wrap_local(fake, spec.sharding, number, self.cotangent_placements)
        self.bindings[0] = {**self.bindings[0], id(tensor): whole}
        return whole


@contextmanager
def _below_levels(tracing: Tracing) -> Iterator[None]:
    """Record what runs in the block, as if no level of `torch.func` were active."""
    modes = _torch.enter_proxy_modes(tracing.tracer, tracing.fake_mode)
    with _torch.isolate(), modes, torch.no_grad():
        yield


@contextmanager
def take_checks(tracing: Tracing) -> Iterator[list[Tensor]]:
    """Let branches in the block go on that else only raise.

    After the block the list has tensors of the trace, which tell whether they do so rightly.
    """
    concluded: list[Tensor] = []
    before = tracing.checks
    checks = tracing.checks = Checks(tracing.node_of, partial(_below_levels, tracing))
    try:
        yield concluded
        concluded += checks.conclude()
    finally:
        tracing.checks = before


def _answer_branch(tracing: Tracing, tensor: Tensor) -> bool | None:
    """The truth value that the user's code asks for, if there is one in a trace."""
    needed = None if tracing.checks is None else tracing.checks.answer(tensor)
    return tracing.truth_of(tensor) if needed is None else needed


def _answer(tracing: Tracing, operator: Any, args: tuple[Any, ...]) -> bool | None:
    """The truth value that code of PyTorch in C++ asks for, if it is known."""
    if tracing.value_guards is None:
        return None
    with _below_levels(tracing):
        asked = question_of_operator(operator, args)
        return None if asked is None else tracing.truth_of(asked)


def _has_fake_of_other_trace(args: tuple[Any, ...], mode: _torch.FakeTensorMode) -> bool:
    found: list[Tensor] = []
    map_arguments(lambda tensor: found.append(tensor) or tensor, args)  # type: ignore[func-returns-value]
    inner = map(_torch.innermost_tensor, found)
    return any(isinstance(t, _torch.FakeTensor) and _is_foreign(t, mode) for t in inner)


def _is_foreign(tensor: Tensor, mode: _torch.FakeTensorMode) -> bool:
    inner = _torch.innermost_tensor(tensor)
    if _torch.is_traceable_wrapper_subclass(inner):  # of this trace if what it is made of is
        names, _ = inner.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = (getattr(inner, name) for name in names)
        return any(isinstance(part, Tensor) and _is_foreign(part, mode) for part in parts)
    return not isinstance(inner, _torch.FakeTensor) or inner.fake_mode is not mode


def _erase_shape_checks(graph: fx.Graph) -> None:
    """Erase what PyTorch computes on the device meta for the shape of an operator on zeros.

    A derivative of the graph would run it on wrapped tensors, which have no storage.
    """
    if not any(_is_on_meta(node) for node in graph.find_nodes(op="placeholder")):
        for node in reversed(list(graph.nodes)):
            if not node.users and _is_on_meta(node) and not node.is_impure():
                graph.erase_node(node)


def _is_on_meta(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_meta

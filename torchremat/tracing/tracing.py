"""From a Python function of tensors to a graph of ATen operators.

A `Tracing` is one run of a function on fake tensors whose operators are written down. It differs
from `make_fx` in three ways: inputs may be added while it runs, so that tensors that the function
closes over, and the cotangents of its outputs, become inputs when they are met; each node knows the
user's line, the module that ran it and the phase it belongs to; and nothing of the surroundings
(`torch.func` levels, dispatch modes) leaks in.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.source import current_source, source_of_error, warn_user
from torchremat.errors import ConcretizationError, EffectError, EffectWarning, TraceError
from torchremat.graph.notes import Notes, note, set_notes
from torchremat.graph.symbolic_sizes import sizes_as_literals
from torchremat.tracing.ambient_state import is_off_meta, without_autocast
from torchremat.tracing.axes.named_axes import out_of_reach
from torchremat.tracing.dtensors import CotangentPlacements, put_together
from torchremat.tracing.input_spec import _CPU, _META, InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.value_guards import Questions, question


def _new_tracer(tracing: "Tracing") -> _torch.PythonKeyTracer:
    """A tracer that notes phase, module and source line on each node it writes.

    PyTorch traces the bodies of `cond` and its kin only from a tracer of exactly its own class.
    """
    tracer = _torch.PythonKeyTracer()
    tracer.graph = fx.Graph(tracer_cls=_torch.PythonKeyTracer)
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    create_node = tracer.create_node

    def create_noted_node(*args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(*args, **kwargs)
        if tracing.notes is not None:
            set_notes(node, tracing.notes.from_trace())
        else:
            module, source = tracing.paths.current, current_source()
            set_notes(node, Notes(tracing.phase, module, source, tracing.grad_enabled))
        return node

    tracer.create_node = create_noted_node  # type: ignore[method-assign]
    return tracer


class _Capture(_torch.TorchFunctionMetadataMode):
    """Replaces the tensors of the outside world, which the function closes over, by inputs.

    It is of the type that `torch.cond` and its kin set aside while Dynamo captures their bodies,
    and put back to run them.
    """

    def __init__(self, tracing: "Tracing") -> None:
        super().__init__(tracing.tracer)
        self._lift = tracing.lift
        self._answer = tracing.answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asked = question(func, args)
        if asked is not None and (answer := self._answer(asked)) is not None:
            return answer
        if func == _SET_DATA:
            if args[0] is args[1]:  # as `module.to` does with what stays as it is
                return None
            raise EffectError(
                f"the function gives a tensor other memory at {current_source()} (x.data = ...): "
                "a graph cannot. Write into the tensor: x.copy_(...)."
            )
        # PyTorch's own code, which makes meta tensors for fake ones, runs inside of an operator
        moves = is_off_meta() and _torch.innermost_proxy_mode() is not None
        if getattr(func, "__name__", "") == "__get__" and func not in _TENSOR_GETTERS:
            value = func(*args)  # x.shape needs no input, x.T does
            return _device_off_meta(value) if moves else value
        if moves:
            args = tuple(map(_device_off_meta, args))
            kwargs = {name: _device_off_meta(value) for name, value in (kwargs or {}).items()}
        if func in _torch.RECURRENT and torch.is_inference_mode_enabled():
            func = _outside_inference_mode(func)
        outside: dict[int, Tensor] = {}

        def lift(tensor: Tensor) -> Tensor:
            inside = self._lift(tensor)
            outside[id(inside)] = tensor
            return inside

        value = func(*map_arguments(lift, args), **map_arguments(lift, kwargs or {}))
        # What returns its argument (`to` the dtype that it has) returns that of the caller, so that
        # `module.to(dtype)` sees a parameter that stays, and not another to put in its place.
        return outside.get(id(value), value)


def _device_off_meta(value: Any) -> Any:
    """The CPU for the meta device, which a function may ask or ask for; all else as it is."""
    if isinstance(value, str | torch.device) and value in ("meta", _META):
        return _CPU
    return value


def _outside_inference_mode(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return func(*args, **kwargs)

    return run


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


_TENSOR_GETTERS = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")
)


def map_arguments(mapping: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Map the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return mapping(value)
    if type(value) in (tuple, list):
        return type(value)(map_arguments(mapping, item) for item in value)
    if type(value) is dict:
        return {key: map_arguments(mapping, item) for key, item in value.items()}
    return value


trace_lock = threading.RLock()
"""Held while a thread traces: PyTorch's own tracing keeps state that threads share."""


class _InProgress(threading.local):
    def __init__(self) -> None:
        self.tracings: list[Tracing] = []


_in_progress = _InProgress()


def lifted(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors` as the innermost trace in progress in this thread sees them, if there is one."""
    tracings = _in_progress.tracings
    return [tracings[-1].lift(t) for t in tensors] if tracings else tensors


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
    notes: Notes | None = None
    opens_calls: bool = False
    on_function: Callable[[type, tuple[Any, ...], Callable[..., Any]], Any] | None = None
    """What to do with a call of a user's `autograd.Function`: class, arguments, `apply`."""
    questions: Questions | None = None
    """Where questions for a value are answered, those that are."""

    def __post_init__(self) -> None:
        self.tracer = _new_tracer(self)
        self.fake_mode = _torch.new_fake_mode(self.shapes)
        self._capture_mode = _Capture(self)
        self._last_placeholder: fx.Node | None = None
        self.placeholders: dict[int, fx.Node] = {}
        self._bindings: list[Mapping[int, Tensor]] = [{}]
        self._outer_grad_mode: bool | None = None
        self._refusal: TraceError | None = None

    @property
    def grad_enabled(self) -> bool:
        """Grad mode, as the user's code sees it that calls an `autograd.Function`."""
        outer = self._outer_grad_mode
        return torch.is_grad_enabled() if outer is None else outer

    @contextmanager
    def grad_mode_kept(self) -> Iterator[None]:
        """What runs in the block is noted with the grad mode of now, whatever it is set to."""
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
        """The graph written so far."""
        return self.tracer.graph

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Operators that run in the block are written into the graph."""
        _torch.let_modes_see_views_of_zeros()
        with ExitStack() as stack:
            stack.enter_context(trace_lock)
            stack.enter_context(out_of_reach())
            stack.enter_context(_torch.isolated_from_surroundings())
            stack.enter_context(_torch.saved_tensors_hooks_set_aside())
            stack.enter_context(_torch.module_trackers_set_aside())
            stack.enter_context(without_autocast())
            stack.callback(self._say_what_was_undone)
            stack.enter_context(self.paths.recording())
            stack.enter_context(self._capture_mode)
            stack.enter_context(_torch.function_calls_handled(self._call_function))
            stack.enter_context(_torch.levels_wrap_lifted(self.lift))
            stack.enter_context(_torch.proxy_modes(self.tracer, self.fake_mode))
            stack.enter_context(torch.autograd.grad_mode.set_multithreading_enabled(False))
            stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it reads values
            stack.enter_context(self._explained_errors())
            _in_progress.tracings.append(self)
            stack.callback(_in_progress.tracings.pop)
            yield

    def _say_what_was_undone(self) -> None:
        written = {id(tensor) for tensor in self.captured_inputs}
        replaced = [
            ".".join(filter(None, (self.paths.name_of(change.module), change.name)))
            for change in self.paths.changes
            if change.is_tensor and id(change.after) not in written
        ]
        if replaced and self.warns:
            warn_user(
                f"a forward pass sets {', '.join(replaced)}: a checkpoint replays a graph, which "
                "leaves the attributes of modules as they are. Return the value, or write it into "
                "a buffer in place (copy_)",
                EffectWarning,
            )

    def input(self, spec: InputSpec, name: str) -> Tensor:
        """Add an input to the graph and return the fake tensor that stands for it."""
        with self.unrecorded():
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

    def twin_of_input(self, fake: Tensor, spec: InputSpec) -> Tensor:
        """One more fake tensor that stands for the input that `fake` stands for."""
        with self.unrecorded(), torch.no_grad():
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
        with self.unrecorded():
            fake = self.fake_mode.from_tensor(value)
        _torch.track(fake, proxy, self.tracer)
        return fake

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Fake tensors are made in the block, and nothing is written down."""
        # a tensor that is first met in inference mode may be used outside it too
        with _torch.isolated_from_surroundings(), torch.inference_mode(False), self.fake_mode:
            yield

    @contextmanager
    def bound(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Iterator[None]:
        """While in the block, each of the captured `tensors` stands for one of `inputs`."""
        self._bindings.append({id(t): i for t, i in zip(tensors, inputs, strict=True)})
        try:
            yield
        finally:
            self._bindings.pop()

    def lift(self, tensor: Tensor) -> Tensor:
        """The tensor of this trace that stands for `tensor`, which may be of the outside world."""
        if not isinstance(tensor, Tensor):
            return tensor
        bound = self._bindings[-1].get(id(tensor))
        if bound is not None:
            return bound
        if not self._is_foreign(tensor):
            return tensor
        return self._capture(tensor)

    def placeholder_of(self, fake: Tensor) -> fx.Node:
        """The placeholder that `input` made for `fake`, which may have been written to since."""
        return self.placeholders[id(fake)]

    @contextmanager
    def asked(self, questions: Questions | None) -> Iterator[None]:
        """While in the block, a function runs of which these are the questions."""
        before, self.questions = self.questions, questions
        if questions is not None:
            questions.begin()
        try:
            yield
        finally:
            self.questions = before

    def answer(self, tensor: Tensor) -> bool | None:
        """What a question for the truth value of `tensor` is answered; `None` if it is not."""
        if self.questions is None:
            return None
        inputs = list(self.placeholders.values())
        node = self.node_of(tensor)
        return self.questions.answer(node, self.tracer.root, inputs, self.captured)

    def ask(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> bool | None:
        """What `module` computes of tensors of this trace, as a truth value; `None` if unknown."""
        modes = _torch.proxy_modes(self.tracer, self.fake_mode)
        with _torch.isolated_from_surroundings(), modes, torch.no_grad():
            (value,) = module(*map(self.lift, inputs))
        return self.answer(value)

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """The node that computed `tensor`, if this trace did."""
        proxy = _torch.proxy_of(tensor, self.tracer)
        return None if proxy is None else proxy.node

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        """Close the graph with `outputs`: tensors of this trace, or literals."""
        nodes = [self._output(value) for value in outputs]
        self.graph.output(tuple(nodes))
        if self.shapes is not None:
            sizes_as_literals(self.graph)
        return fx.GraphModule(self.tracer.root, self.graph)

    def _output(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = self.lift(value)
        node = self.node_of(value)
        assert node is not None, f"an output of the trace is not tracked: {value!r}"
        return node

    def _call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        with self.grad_mode_kept():
            if not _torch.is_active(self._capture_mode) and self._is_of_other_trace(args):
                return apply(*args)  # Dynamo runs, on fake tensors of its own
            args = tuple(map_arguments(self.lift, args))
            if self.on_function is not None and _torch.is_function_of_user(cls):
                return self.on_function(cls, args, apply)
            return apply(*args)

    def _is_of_other_trace(self, args: tuple[Any, ...]) -> bool:
        found: list[Tensor] = []
        map_arguments(lambda tensor: found.append(tensor) or tensor, args)  # type: ignore[func-returns-value]
        inner = map(_torch.innermost_tensor, found)
        return any(isinstance(t, _torch.FakeTensor) and self._is_foreign(t) for t in inner)

    def _is_foreign(self, tensor: Tensor) -> bool:
        inner = _torch.innermost_tensor(tensor)
        if _torch.is_traceable_wrapper_subclass(inner):  # of this trace if what it is made of is
            names, _ = inner.__tensor_flatten__()
            parts = (getattr(inner, name) for name in names)
            return any(isinstance(part, Tensor) and self._is_foreign(part) for part in parts)
        return not isinstance(inner, _torch.FakeTensor) or inner.fake_mode is not self.fake_mode

    def _capture(self, tensor: Tensor) -> Tensor:
        known = self._bindings[0].get(id(tensor))
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
            whole = put_together(fake, spec.sharding, number, self.cotangent_placements)
        self._bindings[0] = {**self._bindings[0], id(tensor): whole}
        return whole

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Say what to do instead where the user's code did what a trace cannot."""
        try:
            with explained_data_dependence():
                yield
        except AttributeError as error:
            if not isinstance(error.obj, _torch.FakeTensor):
                raise
            raise TraceError(
                f"a traced tensor has no attribute {error.name!r}, asked for at "
                f"{source_of_error(error)}: while a function is traced, a plain tensor stands for "
                "one of a subclass (a DTensor, say). Use operators of PyTorch alone, or do what "
                "needs the subclass outside the checkpoint."
            ) from error
        except TypeError as error:
            if self._refusal is None or error is self._refusal:
                raise
            raise self._refusal from error
        except RuntimeError as error:
            if not str(error).startswith(_WRITE_TO_LEAF):
                raise
            raise EffectError(
                f"the function writes in place, at {source_of_error(error)}, to a tensor that has "
                "a gradient and that it closes over or is given. Write to a copy (x.clone())."
            ) from error


_WRITE_TO_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"


_NO_NUMPY = (
    ".numpy() is not supported",
    "tolist() is not supported",
    "Cannot access data pointer",
    "its data is not allocated yet",
    "passed to FakeTensor.__format__",
)


@contextmanager
def explained_data_dependence() -> Iterator[None]:
    """Say what to do instead where the value of a traced tensor is asked for."""
    try:
        yield
    except ConcretizationError:
        raise
    except _torch.DATA_DEPENDENT_ERRORS as error:
        raise _concretization_error(error, str(getattr(error, "func", error))) from error
    except (RuntimeError, TypeError) as error:
        if not any(text in str(error) for text in _NO_NUMPY):
            raise
        raise _concretization_error(error, str(error)) from error


def _concretization_error(error: BaseException, asked: str) -> ConcretizationError:
    return ConcretizationError(
        f"the value of a traced tensor is needed at {source_of_error(error)}, through {asked}, but "
        "while a function is traced a tensor has a shape and a dtype, no value. If it is an "
        "argument that takes few values, name it in `static_argnums` and pass a Python value; to "
        "choose between two tensors use torch.where; between two functions, torch.cond."
    )

"""The tensors that autograd would save of a function, found by a run on fake tensors.

The function runs once in a trace, with PyTorch's own autograd recording. Autograd packs the tensors
that it would save in a real run; the trace has the node of each of them:

    y = x @ w           mm  = aten.mm(x, w)           saved: x, w         from the arguments
    z = sin(y).T        sin = aten.sin(mm)            saved: mm           from a.py:1 (f)
    return z * z        mul = aten.mul(t, t)          saved: t, twice: it lies in the storage of sin

A checkpoint is one node of the trace, whose body is a graph again. A tensor that autograd saves of
it is an input or an output of the body, and is followed to the operator that computes it.
"""

import functools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.core.open_objects import flatten_result
from torchremat.errors import ConcretizationError, TraceError
from torchremat.graph.nodes import base_of, call_of, is_checkpoint, is_item, item_index
from torchremat.remat.checkpointed import call_foreign
from torchremat.remat.escapes.leave_as_found import leave_as_found
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.program import Program
from torchremat.remat.program.random_replay import state_aval
from torchremat.remat.tracing.input_labels import BoundCall, InputLabel
from torchremat.remat.values.scope import Scope, ScopedValue, op_base_name, program_of
from torchremat.tracing.ambient_state import cache_casts, find_gpu, meta_as_cpu
from torchremat.tracing.dtensors import Sharding, local_tensor, wrap_local
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.tracing import Tracing, take_checks
from torchremat.tracing.value_guards import ValueGuards

_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
# the schema of mkldnn_rnn_layer returns output, hy, cy and, fourth, the workspace
_RNN_WORKSPACE = 3


@dataclass(frozen=True, eq=False)
class Reader:
    """A node of autograd's graph that saves a tensor; the `owner` if it is that of a checkpoint.

    The node itself may say nothing once its graph is gone.
    """

    name: str
    owner: Any = None

    @classmethod
    def of(cls, node: Any) -> "Reader":
        decides = isinstance(getattr(node, "program", None), Program)
        return cls(node.name(), node.owner if decides else None)


@dataclass(eq=False)
class SavedStorage:
    """A storage that autograd saves; it contains an `input` or a computed `value`, if known.

    `nodes` are the trace's nodes of the tensors in it, `readers` the nodes of autograd's graph that
    save them.
    """

    aval: Aval
    nbytes: int
    nodes: list[fx.Node] = field(default_factory=list)
    input: "ObservedInput | None" = None
    value: ScopedValue | None = None
    readers: list[Reader] = field(default_factory=list)

    @property
    def offloaded_to(self) -> str:
        """The place to which a checkpoint under plain autograd offloads the value; else `''`."""
        if not all(reader.name == "CheckpointBackward" for reader in self.readers):
            return ""  # under `torch.func` it is an output, which stays on the device
        return next((place for node in self.nodes if (place := _place_of(base_of(node)))), "")


@dataclass(frozen=True, eq=False)
class ObservedInput:
    label: InputLabel
    aval: Aval
    tensor: Tensor
    requires_grad: bool
    is_written: bool


@dataclass(frozen=True, eq=False)
class Observation:
    """The result of a call on fake tensors: storages that autograd saves, and the forward graph."""

    scope: Scope
    inputs: tuple[ObservedInput, ...]
    saved: tuple[SavedStorage, ...]
    live_calls: frozenset[int]

    @property
    def differentiated_inputs(self) -> list[ObservedInput]:
        return [i for i in self.inputs if i.requires_grad]


def observe_saved(call: BoundCall) -> Observation:
    """Run the call on fake tensors, and find the storages that autograd saves.

    The inputs that require a gradient are differentiated, else all floating arguments. Raises
    `TraceError` (a `TypeError`) if there is nothing to differentiate.
    """
    differentiate_all = not call.is_known_to_require_grad()
    found = _observe_run(call, differentiate_all)
    captured = [i for i in found.inputs if i.label.kind != "argument"]
    if differentiate_all and any(i.requires_grad for i in captured):
        return _observe_run(call, False)
    if not found.differentiated_inputs:
        if not differentiate_all:
            found = _observe_run(call, True)
        if not found.differentiated_inputs:
            raise TraceError(
                f"{call.name} has nothing to differentiate: no argument is a floating-point or "
                "complex tensor, and nothing that it closes over requires a gradient. Pass such a "
                "tensor, or call requires_grad_() on the one that it closes over."
            )
    return found


def _observe_run(call: BoundCall, differentiate_all: bool) -> Observation:
    asked: list[str] = []
    found = leave_as_found(call.fun, call.arguments)
    with found, meta_as_cpu(find_gpu(call.list_tensors())), _torch.hide_fakes(asked):
        try:
            return _observe_with_hooks(call, differentiate_all)
        except ConcretizationError:
            if not asked:
                raise
        with _torch.hide_fakes(None):  # a library that finds fake tensors may do without a value
            return _observe_with_hooks(call, differentiate_all)


def _observe_with_hooks(call: BoundCall, differentiate_all: bool) -> Observation:
    try:
        return _Observer(call, differentiate_all).run()
    except RuntimeError as error:
        if _NO_HOOKS not in str(error):
            raise
    return _Observer(call, differentiate_all, with_hooks=False).run()


# torch/_functorch/eager_transforms.py raises this under torch.func.grad and its kin
_NO_HOOKS = "don't yet support saved tensor hooks"


class _SavedHandle:
    """Autograd stores this object in place of a tensor, and frees it as it would the tensor."""

    __slots__ = ("__weakref__", "readers", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.readers: list[Reader] = []


class _Observer:
    """One run. Without hooks, the saved tensors are attributes of the nodes of autograd's graph.

    Not all nodes show them: the one of a write to a view (`CopySlices`) does not.
    """

    def __init__(
        self, call: BoundCall, differentiate_all: bool, *, with_hooks: bool = True
    ) -> None:
        self.call = call
        self.differentiate_all = differentiate_all
        self.paths = ModulePaths(call.roots)
        distinct = {id(tensor): tensor for tensor in call.tensors}  # each is one input
        self.value_guards = ValueGuards(list(distinct.values()))
        self.tracing = Tracing(paths=self.paths, on_checkpoint=call_foreign)
        self.records: list[weakref.ref[_SavedHandle]] = []
        self.versions: dict[int, int] = {}
        self.reader: Reader | None = None
        self.with_hooks = with_hooks

    def run(self) -> Observation:
        tracing = self.tracing
        caches_casts = torch.is_autocast_cache_enabled()
        with tracing.recording(), torch.enable_grad(), _autocast_cache(caches_casts):
            fakes = self._inputs()
            wholes = [
                wrap_local(fake, Sharding.of(tensor), i, tracing.cotangent_placements)
                for i, (fake, tensor) in enumerate(zip(fakes, self.call.tensors, strict=True))
            ]
            bound = tracing.bind_captured(self.call.tensors, wholes)
            guarded = tracing.use_value_guards(self.value_guards)
            with bound, self._hooks(), guarded, self.value_guards.first(), take_checks(tracing):
                output = self.call.run(wholes)
            records = [r for reference in self.records if (r := reference()) is not None]
            nodes = _autograd_nodes(output)
            for node in nodes:
                records += self._read(node)
        programs = [node for node in nodes if isinstance(getattr(node, "program", None), Program)]
        live_calls = frozenset(node.call for node in programs if hasattr(node, "call"))
        module = tracing.finish(())
        scope = Scope.of_trace(module, self.paths)
        inputs = self._build_inputs(fakes, scope)
        saved = self._collect_storages(records, scope, inputs)
        for record in records:
            del record.tensor  # else a cycle with autograd's graph would never be freed
        vars(self).clear()  # the graph has our hooks, which are another cycle with the arguments
        return Observation(scope, tuple(inputs.values()), tuple(saved), live_calls)

    # --- before ----------------------------------------------------------------------------------

    def _inputs(self) -> list[Tensor]:
        fakes: dict[int, Tensor] = {}
        for tensor, label in zip(self.call.tensors, self.call.labels, strict=True):
            if id(tensor) not in fakes:
                fakes[id(tensor)] = self._input(tensor, label.text)
        return [fakes[id(tensor)] for tensor in self.call.tensors]

    def _input(self, tensor: Tensor, name: str) -> Tensor:
        spec = InputSpec.of(tensor, any_level=True)
        name = "".join(c if c.isalnum() else "_" for c in name)
        if spec.requires_grad and spec.is_leaf:
            return self.tracing.input(spec, name)
        floating = spec.dtype.is_floating_point or spec.dtype.is_complex
        fake = self.tracing.input(replace(spec, requires_grad=False, is_leaf=True), name)
        if not (spec.requires_grad or (self.differentiate_all and floating)):
            return fake
        with self.tracing.pause_recording():
            start = torch.empty(0, requires_grad=True)
        started: Tensor = _MarkDifferentiated.apply(fake, start)  # type: ignore[no-untyped-call]
        self.versions[id(started)] = _torch.version_of(started)
        return started

    # --- during ----------------------------------------------------------------------------------

    def _hooks(self) -> AbstractContextManager[Any]:
        if not self.with_hooks:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _SavedHandle:
        # A saved result has the node that saves it as grad_fn: a cycle that nothing would free.
        tensor = local_tensor(tensor)
        record = _SavedHandle(tensor if tensor.is_leaf else tensor.detach())
        if not isinstance(tensor, _torch.FakeTensor) or tensor.fake_mode is self.tracing.fake_mode:
            self.records.append(weakref.ref(record))
        return record

    def _unpack(self, record: _SavedHandle) -> Tensor:
        if self.reader is not None:
            record.readers.append(self.reader)
        return record.tensor

    # --- after -----------------------------------------------------------------------------------

    def _read(self, node: Any) -> list[_SavedHandle]:
        found = []
        self.reader = reader = Reader.of(node)
        for name in dir(node):
            if not (name.startswith("_saved_") or name == "saved_tensors"):
                continue
            value = getattr(node, name)  # through `_unpack`, if there are hooks
            if not self.with_hooks:
                for leaf in _torch.tree_flatten(value)[0]:
                    if isinstance(leaf, Tensor):
                        found.append(_SavedHandle(leaf))
                        found[-1].readers.append(reader)
        self.reader = None
        return found

    def _build_inputs(self, fakes: list[Tensor], scope: Scope) -> dict[int, ObservedInput]:
        written = _find_hidden_writes(scope)
        captured = list(zip(self.tracing.captured, self.tracing.captured_inputs, strict=True))
        labels = self.call.labels_of_captured([t for t, _ in captured], self.paths)
        found: dict[int, ObservedInput] = {}
        pairs = [*zip(self.call.tensors, fakes, strict=True), *captured]
        for (tensor, fake), label in zip(pairs, [*self.call.labels, *labels], strict=True):
            found.setdefault(
                id(fake.untyped_storage()),
                ObservedInput(
                    label,
                    Aval.of(fake),
                    tensor,
                    fake.requires_grad,
                    _torch.version_of(fake) > self.versions.get(id(fake), 0)
                    or self.tracing.placeholder_of(fake) in written,
                ),
            )
        return found

    def _collect_storages(
        self, records: list[_SavedHandle], scope: Scope, inputs: dict[int, ObservedInput]
    ) -> list[SavedStorage]:
        found: dict[int, SavedStorage] = {}
        for record in records:
            storage = record.tensor.untyped_storage()
            node = self.tracing.node_of(record.tensor)
            nbytes = storage.nbytes() or self._workspace_nbytes(node)
            if nbytes == 0:  # batch norm in eval mode saves empty statistics
                continue
            saved = found.get(id(storage))
            if saved is None:
                saved = SavedStorage(Aval.of(record.tensor), nbytes)
                saved.input = inputs.get(id(storage))
                if saved.input is not None:
                    saved.aval = saved.input.aval
                elif node is not None:
                    saved.value = scope.value_of(node)
                    saved.aval = saved.value.aval or saved.aval
                if storage.nbytes() == 0:
                    saved.aval = replace(saved.aval, shape=(nbytes,))
                if node is not None and (state := _state_of(node)) is not None:
                    saved.aval, saved.nbytes = state, state.nbytes
                found[id(storage)] = saved
            saved.nodes += [] if node is None else [node]
            saved.readers += record.readers
        return list(found.values())

    def _workspace_nbytes(self, node: fx.Node | None) -> int:
        """A trace leaves the workspace of a kernel empty."""
        if node is None or not is_item(node) or call_of(node).target is not _RNN_LAYER:
            return 0
        if item_index(node) != _RNN_WORKSPACE or not all(map(is_real, self.call.tensors)):
            return 0
        args: list[Any] = [
            _Like(tuple(arg.meta["val"].shape), arg.meta["val"].dtype)
            if isinstance(arg, fx.Node)
            else tuple(arg)
            if isinstance(arg, list | tuple)
            else arg
            for arg in call_of(node).args
        ]
        return _rnn_workspace_nbytes(*args)


def residual_of(node: fx.Node) -> tuple[FunctionProgram, int] | None:
    if not is_item(node) or not is_checkpoint(call_of(node)):
        return None
    program = program_of(call_of(node))
    if program is None:
        return None
    return program, item_index(node) - (len(call_of(node).meta["val"]) - len(program.residuals))


def _state_of(node: fx.Node) -> Aval | None:
    found = residual_of(node)
    if found is None:
        return None
    program, number = found
    return state_aval(program.residuals[number]) if number in program.replayed_random else None


def _place_of(node: fx.Node) -> str:
    found = residual_of(node)
    if found is None:
        return ""
    program, number = found
    if number not in program.offloaded:
        return ""
    return program.decisions.by_value[program.residuals[number]].place


class _Like(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@functools.cache
def _rnn_workspace_nbytes(*args: Any) -> int:
    """Run one layer of zeros: only oneDNN knows the size, which differs between processors.

    It makes a workspace only where gradients are enabled.
    """
    with _torch.isolate(), torch.enable_grad():
        tensors = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, _Like) else a for a in args]
        workspace: Tensor = _RNN_LAYER(*tensors)[_RNN_WORKSPACE]
        return workspace.untyped_storage().nbytes()


def is_real(tensor: Tensor) -> bool:
    tensor = _torch.innermost_tensor(tensor)
    return not (tensor.is_meta or isinstance(tensor, _torch.FakeTensor))


class _MarkDifferentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, start: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent, None


def _find_hidden_writes(scope: Scope) -> set[Any]:
    """The schemas of batch norms do not say that they write to running statistics."""
    return {
        base_of(statistic)
        for node in scope.nodes
        if node.op == "call_function" and op_base_name(node.target).endswith("batch_norm")
        for statistic in node.args[3:5]
        if isinstance(statistic, fx.Node)
    }


@contextmanager
def _autocast_cache(is_enabled: bool) -> Iterator[None]:
    try:
        with cache_casts(is_enabled):
            yield
    finally:
        torch.clear_autocast_cache()


def _autograd_nodes(output: Any) -> list[Any]:
    leaves, _ = flatten_result(output)
    stack = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    seen: dict[Any, None] = {}
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen[node] = None
            stack.extend(following for following, _ in node.next_functions)
    return list(seen)

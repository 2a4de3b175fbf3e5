"""One trace of a user's function: its region, and what it returned."""

import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor, fx, nn

from torchremat import _torch
from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import TraceOptions
from torchremat.autodiff.replay_rules import is_random
from torchremat.core.open_objects import OpenSize
from torchremat.core.source import source_of_error
from torchremat.core.trees import Structure
from torchremat.errors import DeviceError, EffectError, RetraceError
from torchremat.remat.escapes.escapes import Escapes, EscapeWatch
from torchremat.remat.escapes.live_tensors import LiveTensors
from torchremat.remat.escapes.own_backward import OwnBackwards
from torchremat.remat.escapes.reach import Roots
from torchremat.remat.escapes.read_watch import Spot, Watch, reads_unnoted, stand_for
from torchremat.remat.program.region import Region
from torchremat.remat.tracing.calls import Result
from torchremat.tracing.dynamic_inputs import DynamicInputs
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.attribute_reads import AttributeReads
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.modules.reached_code import GlobalsOf, ReachedCode
from torchremat.tracing.random_sources import DrawWatch
from torchremat.tracing.tracing import Tracing, current_tracing, take_checks
from torchremat.tracing.value_guards import ValueGuards


@dataclass(frozen=True, eq=False)
class FunctionTrace:
    function: Callable[..., Any]
    region: Region
    result: Result
    body: FunctionBody
    captured: Sequence[Tensor]
    paths: ModulePaths
    escapes: Escapes
    watches: Mapping[Spot, Watch]
    """The reads of the places that were watched."""
    code: GlobalsOf

    @property
    def num_draws(self) -> int:
        """How many operators draw random numbers, also in graphs inside."""
        graphs = self.region.joint.module.modules()
        nodes = [n for g in graphs if isinstance(g, fx.GraphModule) for n in g.graph.nodes]
        return sum(isinstance(n.target, _torch.OpOverload) and is_random(n.target) for n in nodes)


@dataclass(frozen=True, eq=False)
class TraceStart:
    """How a trace starts: from which modules, and which places it watches for reads."""

    roots: Sequence[tuple[str, nn.Module]]
    watched: Mapping[Spot, Any] = field(default_factory=dict)
    around: Callable[..., Any] | None = None
    """If given, what runs is `around(fun, *args, **kwargs)`."""
    may_check: bool = True
    """Whether branches that else only raise are checks; if not, they are errors."""
    reads: AttributeReads | None = None
    """Notes which attributes of modules are read, also where a derivative is traced."""
    number_watches: Mapping[int, Watch] = field(default_factory=dict)
    """Numbers among the arguments, counted from 0, in whose places are stand-ins."""
    asked_for_fakes: list[str] | None = field(default_factory=list)
    """Takes files that look for fake tensors and find none; `None`: they find them."""


def trace_function(
    fun: Callable[..., Any],
    structure: Structure,
    specs: Sequence[InputSpec],
    dynamic: DynamicInputs | None,
    start: TraceStart,
    options: TraceOptions,
    values: Sequence[Tensor] = (),
) -> FunctionTrace:
    """Trace `fun`, called as `structure` says with tensors of `specs`, or of `dynamic` sizes.

    It does not keep `fun` alive. Branches on masks are answered by `values`, the tensors of the
    call.
    """
    paths = _paths_of(start)
    flat = _FlatFunction(_weakly(fun), structure, start)
    around_it = current_tracing()
    outer = None if around_it is None else around_it.evaluate
    value_guards = ValueGuards(values, outer)
    flat.body = body = FunctionBody(lambda: flat, specs, value_guards, start.asked_for_fakes)
    names = [f"arg{i}" for i in range(len(specs))]
    traced_specs = specs if dynamic is None else dynamic.specs
    with (
        flat.own_backwards.refuse_changes(),
        _explain_missing_device(fun),
        value_guards.first(),
    ):
        region = Region.trace(body, traced_specs, names, paths, options, dynamic)
    assert body.captured is not None and flat.result is not None
    found = body.captured()
    escapes, code = flat.escapes, flat.code.globals_of
    return FunctionTrace(fun, region, flat.result, body, found, paths, escapes, flat.watches, code)


def _paths_of(start: TraceStart) -> ModulePaths:
    paths = ModulePaths({}, start.reads)
    for name, module in start.roots:
        paths.add_root(module, name)
    return paths


def trace_as_before(
    fun: Callable[..., Any],
    structure: Structure,
    specs: Sequence[InputSpec],
    start: TraceStart,
    like: Region,
    result: Result,
) -> tuple[FunctionBody, Region]:
    """The body and the region of `fun` as if it had been traced, where `like` is alike.

    Traces of its derivatives run `fun` itself.
    """
    paths = _paths_of(start)
    flat = _FlatFunction(_weakly(fun), structure, start)
    asked = like.body.asked_for_fakes if isinstance(like.body, FunctionBody) else None
    flat.body = body = FunctionBody(lambda: flat, specs, asked_for_fakes=asked)
    flat.result = result
    body.num_escaped, body.num_checks = like.body.num_escaped, like.body.num_checks
    body.shardings += [None] * (len(like.specs) - len(specs))
    own = (body, like.specs, like.names, paths, like.options)
    region = Region(*own, dynamic=like.dynamic, joint=like.joint)
    region.graphs = like.graphs
    return body, region


class _FlatFunction:
    """The function from tensors to the tensors that it returns, and those that it leaves elsewhere.

    `result` and `escapes` are those of its first run. A trace of a derivative runs it again.
    """

    body: FunctionBody

    def __init__(
        self,
        get_function: Callable[[], Callable[..., Any]],
        structure: Structure,
        start: TraceStart,
    ) -> None:
        self._get_function = get_function
        self._structure = structure
        self._around = start.around or _call
        inside = dict.fromkeys(module for _, root in start.roots for module in root.modules())
        self._watched = start.watched
        self._number_watches = start.number_watches
        self._may_check = start.may_check
        self._modules = [weakref.ref(module) for module in inside]
        self._caches: list[Any] = []
        self.result: Result | None = None
        self.escapes = Escapes()
        self.watches: Mapping[Spot, Watch] = {}
        self.code = ReachedCode()
        self.own_backwards = OwnBackwards()

    def __call__(self, tensors: list[Tensor]) -> list[Any]:
        tracing = current_tracing()
        function = self._get_function()
        is_first = self.result is None
        args, kwargs = self._fill_in(tensors)
        roots = Roots(function, (args, kwargs))
        live = LiveTensors(tracing, tensors) if is_first and tracing is not None else None
        if is_first and tracing is not None:
            tracing.on_own_backward = self.own_backwards.note_call
        with self.escapes.rewind(roots):
            watch = self._new_watch(roots, tensors)
            try:
                with (
                    watch.around_hooks(),
                    watch.around_reads() as watches,
                    _watch_draws(tracing if is_first else None, watch),
                    self._take_checks(tracing) as checks,
                    self.code if is_first else nullcontext(),
                ):
                    value = self._around(function, *args, **kwargs)
            finally:
                found, escaped = watch.take_out()
        result = Result(value, lambda: describe_fun(function), watch.find_elsewhere)
        value = None
        watch.refuse_changed_arrays(describe_fun(function))
        self.own_backwards.watch()
        if is_first:
            _refuse_wrapped(escaped, tracing)
            found.places.update(watch.places_of(_find_captured(tracing), self._get_function))
            self.result, self.escapes, self.watches = result, found, watches
            self.body.num_escaped, self.body.num_checks = len(escaped) + len(checks), len(checks)
        else:
            self._compare(len(escaped), len(checks))
        outputs = [*result.tensors, *escaped, *checks]
        del escaped, watch, checks
        if live is not None:
            self._caches += live.refuse_kept(tensors, [outputs, result.tensors])
        for cache in self._caches:
            cache.cache_clear()
        return outputs

    def _fill_in(self, tensors: list[Tensor]) -> Any:
        """The arguments; in the first run with stand-ins for numbers that are watched."""
        structure = self._structure
        if self._number_watches and self.result is None:
            structure = _put_stand_ins(structure, self._number_watches)
        with reads_unnoted():
            return structure.unflatten(tensors)

    def _take_checks(self, tracing: Tracing | None) -> AbstractContextManager[list[Tensor]]:
        if tracing is None or not self._may_check:
            return nullcontext([])
        return take_checks(tracing)

    def _compare(self, num_escaped: int, num_checks: int) -> None:
        """Compare a trace for a derivative with the first one."""
        before = self.body.num_escaped - self.body.num_checks
        if num_escaped != before:
            raise RetraceError(
                f"{self._name} leaves {num_escaped} tensors outside of itself (in attributes, "
                f"lists or dicts) where it is traced again for a derivative, and left {before} "
                "before. Let what it keeps depend on its arguments alone."
            )
        if num_checks != self.body.num_checks:
            raise RetraceError(
                f"{self._name} checks other conditions (`if not valid.all(): raise ...`) where it "
                "is traced again for a derivative than before. Let what it checks depend on its "
                "arguments alone."
            )

    @property
    def _name(self) -> str:
        return describe_fun(self._get_function())

    def _new_watch(self, roots: Roots, tensors: list[Tensor]) -> EscapeWatch:
        modules = [module for ref in self._modules if (module := ref()) is not None]
        watched = self._watched if self.result is None else {}
        return EscapeWatch(roots, modules, _inputs_by_identity(tensors), watched)


def _find_captured(tracing: Tracing | None) -> Sequence[Tensor]:
    return () if tracing is None else tracing.captured


def _put_stand_ins(structure: Structure, watches: Mapping[int, Watch]) -> Structure:
    numbers = itertools.count()

    def find_watch(leaf: Any) -> Watch | None:
        return watches.get(next(numbers)) if type(leaf) in (int, float) else None

    def put(leaf: Any) -> Any:
        if type(leaf) is OpenSize:  # a `torch.Size` takes numbers alone
            for of_size in filter(None, map(find_watch, leaf.values)):
                of_size.is_read = True
            return leaf
        watch = find_watch(leaf)
        return leaf if watch is None else stand_for(leaf, watch)

    return Structure(_torch.tree_map(put, structure.tree, is_leaf=lambda x: type(x) is OpenSize))


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextmanager
def _watch_draws(tracing: Tracing | None, watch: EscapeWatch) -> Iterator[None]:
    if tracing is None:
        yield
        return
    draws = DrawWatch(tracing.tracer.root, watch.knows)
    tracing.on_node = draws.note
    try:
        yield
    finally:
        tracing.on_node = None
        draws.finish()


def _refuse_wrapped(tensors: Sequence[Tensor], tracing: Tracing | None) -> None:
    for tensor in tensors:
        if tracing is not None and tracing.node_of(tensor) is None:
            raise EffectError(
                f"a tensor of shape {tuple(tensor.shape)} is left in an attribute, a list or a "
                "dict, from within vmap, grad or another transformation. A "
                "checkpoint cannot put it there: return it."
            )


def _inputs_by_identity(tensors: Sequence[Tensor]) -> Callable[[Tensor], int | None]:
    numbers = {id(tensor): i for i, tensor in enumerate(tensors)}
    tracing = current_tracing()

    def find(tensor: Tensor) -> int | None:
        number = numbers.get(id(tensor))
        if number is None and tracing is not None:
            bound = tracing.bindings[-1].values()
            number = next((i for i, t in enumerate(bound, len(numbers)) if t is tensor), None)
        return number

    return find


_NO_DEVICE = r"PyTorch is not linked with support for \w+ devices"


@contextmanager
def _explain_missing_device(fun: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not re.match(_NO_DEVICE, str(error)):
            raise
        raise DeviceError(
            f"{describe_fun(fun)} at {source_of_error(error)}: {error}. This machine, or "
            "this build of PyTorch, has no such device. Ask torch.accelerator.is_available() "
            "first, or make tensors where the arguments are (device=x.device)"
        ) from error


def describe_fun(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__qualname__", None) or type(fun).__name__


def _weakly(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """A way to get at `fun` that does not keep it alive."""
    try:
        reference = weakref.WeakMethod(fun) if isinstance(fun, MethodType) else weakref.ref(fun)
    except TypeError:
        return lambda: fun

    def get() -> Callable[..., Any]:
        found = reference()
        assert found is not None, "the function of a checkpoint is gone"
        return found

    return get

"""Traces: fake tensors, the modes that record operators on them, and isolation from both."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    disable_fake_tensor_cache,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.autograd.graph import _engine_run_backward
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.fx.experimental.proxy_tensor import PythonKeyTracer as PythonKeyTracer
from torch.fx.experimental.proxy_tensor import (
    TorchFunctionMetadataMode as TorchFunctionMetadataMode,
)
from torch.fx.experimental.proxy_tensor import (
    _MakefxTracer,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    set_proxy_slot,
    thunkify,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from .functorch import functorch_is_active
from .kernel_strides import has_other_strides, lay_out_as_kernel
from .patches import dual_level_as_functorch_level, enter_trace
from .symbols.known_results import KnownResults
from .symbols.shape_env import AskingShapeEnv
from .versions import slice_rule

aten = torch.ops.aten

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
"""In inference mode a fake tensor has them run by PyTorch's rules in Python (`_rnn_helper` in
`torch/_decomp`), which lose the dropout between layers."""

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def isolate() -> Iterator[None]:
    """Run as if no `torch.func` level and no dispatch mode were active; autocast stays."""
    with ExitStack() as stack:
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(disable_autocast_cache())
        stack.enter_context(_suspend_captures())
        stack.enter_context(dual_level_as_functorch_level())
        yield


@contextmanager
def _suspend_captures() -> Iterator[None]:
    """Without the function modes of traces in progress; a user's own modes stay."""
    modes = _get_current_function_mode_stack()
    if not any(isinstance(mode, TorchFunctionMetadataMode) for mode in modes):
        yield
        return
    for _ in modes:
        _pop_mode()
    others = [mode for mode in modes if not isinstance(mode, TorchFunctionMetadataMode)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Take `mode` off the stack of function modes, where others may have come above it."""
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def new_fake_mode(shapes: ShapeEnv | None = None) -> FakeTensorMode:
    """A mode for fake tensors, as `make_fx` makes it: of fixed shapes unless `shapes` is given.

    (No subclass: the rules of higher-order operators are found by the very class of the mode.)
    """
    fixed = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(
        allow_fallback_kernels=True, shape_env=shapes or fixed, static_shapes=shapes is None
    )
    reference = weakref.ref(mode)
    answers_by_hints = shapes is not None and not isinstance(shapes, AskingShapeEnv)
    known = KnownResults() if answers_by_hints else None

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = reference()
        assert mode is not None, "it is active"
        if func in _QUESTIONS and (answer := getattr(mode, "answer", None)) is not None:
            value = answer(func, args)
            if value is not None:
                return value
        if func is _GROUPED_MM:
            with mode:
                return _make_grouped_mm(*args, **(kwargs or {}))
        if isinstance(shapes, AskingShapeEnv):
            shapes.prepare(func, args)
            if slice_rule.IS_NEEDED and func is aten.slice.Tensor:
                with mode, enable_python_dispatcher():
                    part = slice_rule.slice_fake(*args, **(kwargs or {}))
                if part is not None:
                    return part
        call = partial(FakeTensorMode.dispatch, mode, func, types, args, kwargs)
        if has_other_strides(func):
            call = partial(_lay_out, mode, func, args, call)
        if shapes is None:
            return _without_cache(mode, call) if func is _ZEROS_LAID_OUT_AS else call()
        find_anew = partial(_apply_symbolic_rules, mode, call)
        if known is None:
            return find_anew()
        return known.find(mode, func, (args, kwargs or {}), find_anew)

    mode.dispatch = dispatch  # type: ignore[method-assign]
    return mode


def _lay_out(mode: FakeTensorMode, func: Any, args: Any, call: Callable[[], Any]) -> Any:
    result = call()
    with mode:
        return lay_out_as_kernel(func, args, result)


def _without_cache(mode: FakeTensorMode, call: Callable[[], Any]) -> Any:
    with disable_fake_tensor_cache(mode):
        return call()


def _apply_symbolic_rules(mode: FakeTensorMode, call: Callable[[], Any]) -> Any:
    """Let operators find PyTorch's rules for symbolic sizes, written in Python.

    Turned on for a whole trace, as `make_fx` does, the rules would also decompose other operators
    than eager PyTorch does, before they are recorded.
    """
    with enable_python_dispatcher(), disable_fake_tensor_cache(mode):
        return call()


_QUESTIONS = (aten.equal.default, aten._local_scalar_dense.default)
"""Operators whose result is a value of Python, which code of PyTorch in C++ asks for too."""


@contextmanager
def answer_operators(
    mode: FakeTensorMode, answer: Callable[[Any, tuple[Any, ...]], Any]
) -> Iterator[None]:
    """Let `answer` say what operators return that ask for a value of fake tensors of `mode`."""
    mode.answer = answer  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del mode.answer  # type: ignore[attr-defined]


def erase_questions(graph: torch.fx.Graph) -> None:
    """Erase the operators that nothing but Python wanted the value of."""
    for target in _QUESTIONS:
        for node in graph.find_nodes(op="call_function", target=target):
            if not node.users:
                graph.erase_node(node)


ZERO_TENSOR: OpOverload = torch.ops.aten._efficientzerotensor.default
"""Makes a zero without memory, which forward mode gives where there is no tangent."""

_ZEROS_LAID_OUT_AS = aten._new_zeros_with_same_feature_meta.default
"""Makes the tangent of a view. PyTorch's cache of fake results forgets its storage offset."""

_GROUPED_MM = torch.ops.aten._grouped_mm.default


def _make_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of `torch.nn.functional.grouped_mm`, laid out as its kernels do.

    The rule of PyTorch 2.13 takes nothing but bfloat16; the kernels also take float32 and float16.
    It pads rows to 16 bytes only in builds for CUDA, the kernels in all but those for ROCm.
    """
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected matrices of one dtype, got {a.dtype} and {b.dtype}")
    is_by_group = a.dim() == 2 and b.dim() == 2  # of columns of a and rows of b
    if not is_by_group and a.size(-1) != b.size(-2):
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    if (offs is None) != (a.dim() == 3 and b.dim() == 3):
        raise RuntimeError("offsets are needed unless both matrices have 3 dimensions")
    batch = [] if a.dim() != b.dim() else [offs.size(0) if offs is not None else a.size(0)]
    dtype = out_dtype or a.dtype
    rows, columns = a.size(-2), b.size(-1)
    multiple = 1 if torch.version.hip else 16 // dtype.itemsize
    padded = (columns + multiple - 1) // multiple * multiple
    strides = [*([rows * padded] if batch else []), padded, 1]
    return a.new_empty_strided([*batch, rows, columns], strides, dtype=dtype)


def new_tracer() -> PythonKeyTracer:
    """A tracer with an empty graph, which holds generators of random numbers as `get_attr` nodes.

    It is of that very class: PyTorch traces the bodies of `torch.cond` and its kin only from one.
    """
    tracer = PythonKeyTracer()
    tracer.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    tracer.enable_thunkify = True  # arithmetic on sizes is recorded where a result of it is used
    if type(torch.Generator) is type:  # has a metaclass where tracers take it by themselves
        create_arg = tracer.create_arg

        def create_arg_of_generator(value: Any) -> Any:
            if not isinstance(value, torch.Generator):
                return create_arg(value)
            name = tracer.tensor_attrs.get(value)  # type: ignore[call-overload]
            if name is None:
                name = tracer.get_fresh_qualname("_generator")
                setattr(tracer.root, name, value)
                tracer.tensor_attrs[value] = name  # type: ignore[index]
            return tracer.create_node("get_attr", name, (), {})

        tracer.create_arg = create_arg_of_generator  # type: ignore[method-assign,assignment]
    return tracer


@contextmanager
def enter_proxy_modes(tracer: PythonKeyTracer, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Let `tracer` record operators on fake tensors, also the bodies of `torch.cond`."""
    # "fake" also where sizes are symbols: "symbolic" decomposes operators by other rules
    # a table that is given, even an empty one: without it 2.15 drops `detach` from the graph
    session = _MakefxTracer({}, "fake", False, False, False, False, True)
    session.fake_tensor_mode = fake_mode
    session.fx_tracer = tracer
    session._construct_modes_with_fx_tracer(tracer)
    with ExitStack() as stack:
        stack.enter_context(fake_mode)
        stack.enter_context(session.proxy_mode)
        stack.enter_context(enter_trace(session))
        yield


class _NanChecks(TorchDispatchMode):
    """Answers the checks of anomaly mode, which reads each gradient: a fake one has no values.

    The engine calls the three operators from C++, so that no Python stands between it and them.
    """

    supports_higher_order_operators = True
    _CHECK = (aten.isnan.default, aten._is_any_true.default, aten._local_scalar_dense.default)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._no = torch.tensor(False)

    @classmethod
    def is_infra_mode(cls) -> bool:  # else Dynamo would not capture the bodies of `torch.cond`
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # which would stand between, too
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self._CHECK and sys._getframe(1).f_code is _engine_run_backward.__code__:
            return False if func is self._CHECK[-1] else self._no
        return func(*args, **(kwargs or {}))


def answer_nan_checks() -> AbstractContextManager[Any]:
    """Let backward passes in the block run on fake tensors though anomaly mode is on.

    Anomaly mode is of the whole process: other threads have their checks in the meantime.
    """
    checks = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return _NanChecks() if checks else nullcontext()


def replay_views() -> AbstractContextManager[Any]:
    """Differentiate writes to views in the block by the views themselves.

    Otherwise PyTorch may write the gradient of a slice by `as_strided_scatter`. The derivative of
    that with respect to the tensor written to is wrong (2.11 to 2.15).
    """
    return _force_original_view_tracking(True)


def find_ragged_dim(nested: Any) -> int:
    """The dim of a jagged nested tensor whose size differs; the batch is dim 0."""
    is_ragged = [isinstance(n, torch.SymInt) and n.node.is_nested_int() for n in nested.shape]
    return is_ragged.index(True)


def innermost_proxy_mode() -> ProxyTorchDispatchMode | None:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # type: ignore[no-any-return]


untraced = disable_proxy_modes_tracing
"""A context in which no graph records operators on fake tensors."""


def is_faking() -> bool:
    """Whether operators run on fake tensors, in a trace or outside any."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def track(tensors: Any, proxies: Any, tracer: PythonKeyTracer) -> Any:
    with disable_proxy_modes_tracing(), without_function_modes():
        return track_tensor_tree(tensors, proxies, constant=None, tracer=tracer)


def track_size(size: Any, tracer: Any, target: Callable[[], Any]) -> None:
    """Make a call of `target` stand for `size` in the trace of `tracer`, unless something does."""
    if size in tracer.symnode_tracker:
        return
    proxy = tracer.create_proxy("call_function", target, (), {})
    proxy.node.meta["val"] = size
    set_proxy_slot(size, tracer, thunkify(tracer, lambda: proxy))


def proxy_of(tensor: torch.Tensor, tracer: PythonKeyTracer) -> torch.fx.Proxy | None:
    slot = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy


def is_active(mode: TorchFunctionMetadataMode) -> bool:
    return mode in _get_current_function_mode_stack()


without_function_modes = torch.DisableTorchFunction
"""A context in which no `TorchFunctionMode` sees anything."""


@contextmanager
def autograd_as_at_the_top() -> Iterator[None]:
    """Let the kernel of an operator differentiate by `torch.func`, below autograd and user's modes.

    The kernel sees neither what autograd records of its arguments, nor their tangents.
    """
    keys = (
        DispatchKey.AutogradCPU,  # and those of the other devices
        DispatchKey.AutogradOther,
        DispatchKey.AutogradNestedTensor,
        DispatchKey.ADInplaceOrView,
        DispatchKey.FuncTorchDynamicLayerFrontMode,
        DispatchKey.FuncTorchDynamicLayerBackMode,
        DispatchKey.FuncTorchGradWrapper,
    )
    with isolate():
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in keys:
            excluded = excluded.remove(key)
        views = torch.DispatchKeySet(DispatchKey.ADInplaceOrView)
        included = torch._C._dispatch_tls_local_include_set() | views
        with (
            torch._C._ForceDispatchKeyGuard(included, excluded),
            torch.no_grad(),
            forward_ad._set_fwd_grad_enabled(False),
        ):
            yield


is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def function_modes() -> Sequence[Any]:
    """The modes of the user in force, which see the functions of PyTorch that are called."""
    modes = _get_current_function_mode_stack()
    return [m for m in modes if type(m).__module__.partition(".")[0] not in ("torch", "torchremat")]


def kinds_of_function_modes() -> tuple[type, ...]:
    """The types of `function_modes`."""
    return tuple(map(type, function_modes()))


SWITCHES = (
    kinds_of_function_modes,
    torch.is_inference_mode_enabled,
    torch._C._get_deterministic_algorithms,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)
"""Functions that tell the state of PyTorch on which its Python code branches."""

PLAIN_TORCH_FUNCTIONS = (
    vars(torch.Tensor).get("__torch_function__"),
    vars(torch.Tensor.__base__).get("__torch_function__"),
    torch.nn.Parameter.__torch_function__,
)
"""The `__torch_function__` of tensors, and of subclasses without functions of their own."""


def is_transformed_or_watched() -> bool:
    """Whether `torch.func` or a dispatch mode is to see the operators that run."""
    return functorch_is_active() or torch._C._len_torch_dispatch_stack() > 0


def is_traceable_wrapper_subclass(value: Any) -> bool:
    """Whether `value` is a tensor made of others, which it names in `__tensor_flatten__`."""
    if type(value) is torch.Tensor or not isinstance(value, torch.Tensor):
        return False
    return hasattr(value, "__tensor_flatten__") and hasattr(value, "__tensor_unflatten__")


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)

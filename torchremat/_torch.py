"""Everything private of PyTorch that torchremat uses, in one place.

A new PyTorch release is one file's work: `tests/test_torch.py` names each entry and checks that
it is there and behaves as the library needs. No other file of the package imports a private name.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import FrameType, UnionType
from typing import Any, TypeVar, get_origin

import torch
from torch import SymInt, distributed
from torch._C import DispatchKey as DispatchKey
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import TensorGuards as TensorGuards
from torch._C._functorch import TransformType as TransformType
from torch._C._functorch import (
    _add_batch_dim,
    _unwrap_batched,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_get_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
    unwrap_if_dead,
)
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import autograd_function, eager_transforms
from torch._functorch import vmap as functorch_vmap
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.utils import unwrap_dead_wrappers as unwrap_dead_wrappers
from torch._functorch.vmap import restore_vmap as restore_vmap
from torch._functorch.vmap import unwrap_batched
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctorchFunctionalizeAPI
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward
from torch.distributed import device_mesh
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.fx.experimental.proxy_tensor import PythonKeyTracer as PythonKeyTracer
from torch.fx.experimental.proxy_tensor import (
    TorchFunctionMetadataMode as TorchFunctionMetadataMode,
)
from torch.fx.experimental.proxy_tensor import (
    _MakefxTracer,
    _set_make_fx_tracer,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    set_proxy_slot,
    thunkify,
    track_tensor_tree,
)
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._sympy.printers import PythonPrinter

if distributed.is_available():
    from torch.distributed import distributed_c10d

_F = TypeVar("_F", bound=Callable[..., Any])

# --- processes -----------------------------------------------------------------------------------

process_collectives = torch.ops._c10d_functional
"""Collectives of processes that take the name of their group; `wait_tensor` gives the result."""


def group_named(name: str) -> Any:
    """The process group of that name; `RuntimeError` if there is none."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def store_of_processes() -> Any:
    """Where all processes of the default group can set and read keys."""
    return distributed_c10d._get_default_store()


def timeout_of_processes() -> timedelta:
    """How long the default process group waits for a process, in a collective."""
    group = distributed_c10d._get_default_group()
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    found = getattr(options, "_timeout", None)
    return distributed_c10d.default_pg_timeout if found is None else found


def current_mesh() -> Any:
    """The device mesh of the innermost `with mesh:` of this thread, if any."""
    resources = getattr(device_mesh, "_mesh_resources", None)  # none without torch.distributed
    return resources.mesh_stack[-1] if resources is not None and resources.mesh_stack else None


# --- trees ---------------------------------------------------------------------------------------

TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_unflatten = _pytree.tree_unflatten
tree_map = _pytree.tree_map
keystr = _pytree.keystr
register_pytree_node = _pytree.register_pytree_node
GetAttrKey = _pytree.GetAttrKey


def children_of(spec: TreeSpec) -> Sequence[TreeSpec]:
    """The structures of the subtrees right below the root."""
    children = getattr(spec, "children", None)  # a method since PyTorch 2.12 or so
    return children() if callable(children) else spec.children_specs


# --- functorch -----------------------------------------------------------------------------------

functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def differentiates() -> bool:
    """Whether any active `torch.func` level is reverse-mode differentiation."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == TransformType.Grad for interpreter in stack)


def transform_depth() -> int:
    """How many levels of `torch.func` are active: the number of the innermost."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def innermost_transform() -> TransformType | None:
    """The kind of the innermost active `torch.func` transformation, if any."""
    interpreter = peek_interpreter_stack()
    return None if interpreter is None else interpreter.key()


def requires_grad_at_any_level(tensor: torch.Tensor) -> bool:
    """Whether any `torch.func` level, or plain autograd, differentiates `tensor`."""
    while True:
        if tensor.requires_grad:
            return True
        if not is_functorch_wrapped_tensor(tensor):
            return False
        tensor = get_unwrapped(tensor)


RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
"""In inference mode a fake tensor has them run by PyTorch's rules in Python (`_rnn_helper` in
`torch/_decomp`), which lose the dropout between layers."""


def innermost_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without the wrappers of `torch.func` levels."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_mapped_at(tensor: torch.Tensor, level: int) -> bool:
    """Whether `torch.vmap` at that level of `torch.func` maps over an axis of `tensor`."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor) and maybe_get_level(tensor) == level:
            return True
        tensor = get_unwrapped(tensor)
    return False


mapped_at: Callable[[torch.Tensor, int, int], torch.Tensor] = _add_batch_dim
"""A tensor whose dimension (2nd argument) is what `torch.vmap` at a level (3rd) maps over."""


def let_functions_know_axes(known: Callable[[type], type]) -> None:
    """Let `torch.vmap` map `known(function)` in place of each `autograd.Function` without a rule.

    Its forward runs on a level of its own then, and so does its backward, later on.
    """
    plain = autograd_function.vmapify_autograd_function

    def vmapify(function: type, *args: Any) -> type:
        return plain(known(function), *args)

    autograd_function.vmapify_autograd_function = vmapify  # type: ignore[assignment]


def offset_of(tensor: torch.Tensor) -> int:
    """Where `tensor` begins in its storage; 0 for one that a level of `torch.func` wraps."""
    if is_functorch_wrapped_tensor(tensor):
        return 0
    return tensor.storage_offset()  # type: ignore[return-value]


def push_forward_at_current_level(
    rule: Callable[[list[torch.Tensor], list[torch.Tensor | None]], tuple[Any, Any]],
    inputs: Sequence[torch.Tensor],
) -> tuple[Any, ...]:
    """Apply the rule of an operator for the innermost level, a `torch.func.jvp`.

    `rule` takes primals and tangents as the levels below see them, and gives outputs and their
    tangents.
    """
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    primals, tangents = [], []
    for tensor in inputs:
        tangent = forward_ad.unpack_dual(tensor).tangent
        primals.append(_unwrap_for_grad(tensor, level))
        tangents.append(None if tangent is None else _unwrap_for_grad(tangent, level))
    with _lowered(interpreter):
        outputs, out_tangents = rule(primals, tangents)
    wrapped = []
    for output, tangent in zip(outputs, out_tangents, strict=True):
        outer = _wrap_for_grad(output, level)
        if tangent is not None:
            outer = forward_ad.make_dual(outer, _wrap_for_grad(tangent, level))
        wrapped.append(outer)
    return tuple(wrapped)


def push_dual_numbers_forward(
    rule: Callable[[list[torch.Tensor], list[torch.Tensor | None]], tuple[Any, Any]],
    inputs: Sequence[torch.Tensor],
) -> tuple[Any, ...]:
    """Apply the rule of an operator to the dual numbers of a `forward_ad.dual_level`."""
    tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in inputs]
    primals = [
        tensor if tangent is None else forward_ad.unpack_dual(tensor).primal
        for tensor, tangent in zip(inputs, tangents, strict=True)
    ]
    return tuple(
        output if tangent is None else forward_ad.make_dual(output, tangent)
        for output, tangent in zip(*rule(primals, tangents), strict=True)
    )


def has_tangents(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of `tensors` is a dual number, of a `forward_ad.dual_level`."""
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


class _AtLevel(_SingleLevelFunction):
    """What a level of `torch.func.grad` records for an operator: see `record_at_current_level`."""

    @staticmethod
    def forward(ctx: Any, interpreter: Any, records: bool, rule: Any, *inputs: Any) -> Any:
        level = interpreter.level()

        @contextmanager
        def lower() -> Iterator[None]:
            with torch.set_grad_enabled(records), interpreter.lower():
                yield

        inner = [_unwrap_for_grad(tensor, level) for tensor in inputs]
        # outer levels need what the call of an autograd function switches off
        with forward_ad._set_fwd_grad_enabled(True):
            outputs, residuals, ctx.pull = rule(inner, ctx.needs_input_grad[3:], lower)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*residuals)
        wrapped = [_wrap_for_grad(_unwrap_for_grad(output, level), level) for output in outputs]
        discrete = (t for t in wrapped if not (t.is_floating_point() or t.is_complex()))
        ctx.mark_non_differentiable(*discrete)
        return tuple(wrapped)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return (None, None, None, *ctx.pull(ctx.saved_tensors, cotangents))


RecordRule = Callable[
    [list[torch.Tensor], Sequence[bool], Callable[[], AbstractContextManager[None]]],
    tuple[Any, Any, Any],
]
"""Takes inputs as lower levels see them, which of them are differentiated, and a context in which
operators run in the levels below. Gives outputs, tensors to keep, and a function from those and
cotangents to cotangents of the inputs."""


def record_at_current_level(
    rule: RecordRule, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Apply the rule of an operator for the innermost level, a `torch.func.grad` or `vjp`."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    lifted, _ = interpreter.lift(tuple(inputs), {})  # or they might require a gradient elsewhere
    with enable_single_level_autograd_function():
        return _AtLevel.apply(interpreter, torch.is_grad_enabled(), rule, *lifted)  # type: ignore[attr-defined,no-any-return]


def leaf_at_current_level(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a new starting point of what the innermost level, a `grad`, records."""
    level = retrieve_current_functorch_interpreter().level()
    with eager_transforms.enable_inplace_requires_grad(True):
        return _wrap_for_grad(_unwrap_for_grad(tensor, level), level).requires_grad_()


def map_at_current_level(
    rule: Callable[[Sequence[torch.Tensor], Any, int, str], tuple[Any, Any]],
    inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Apply the rule of an operator for the innermost level, a `torch.func.vmap`.

    `rule` takes the tensors of all examples, where the axis is in each, its size and what random
    operators do; and gives outputs and where the axis is in each.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    inner, in_dims = unwrap_batched(tuple(inputs), level)
    with interpreter.lower():
        outputs, out_dims = rule(inner, in_dims, interpreter.batch_size(), interpreter.randomness())
    return tuple(
        output if dim is None else _add_batch_dim(output, dim, level)
        for output, dim in zip(outputs, out_dims, strict=True)
    )


class _Lowered(threading.local):
    def __init__(self) -> None:
        self.layers: list[tuple[int, Any]] = []


_lowered_layers = _Lowered()


@contextmanager
def _lowered(interpreter: Any) -> Iterator[None]:
    """`interpreter.lower()` for a `torch.func.jvp`, whose tangents can be asked for meanwhile."""
    level = interpreter.level()
    with ExitStack() as stack:
        if not interpreter.prev_fwd_grad_mode():
            stack.enter_context(forward_ad._set_fwd_grad_enabled(False))
        layer = pop_dynamic_layer_stack()
        stack.callback(push_dynamic_layer_stack, layer)
        _lowered_layers.layers.append((level, layer))
        stack.callback(_lowered_layers.layers.pop)
        yield


def without_level(tensor: torch.Tensor, level: int) -> tuple[torch.Tensor, bool]:
    """`tensor` as the levels of `torch.func` below `level`, which differentiates, see it.

    And whether that level, which has been lowered, differentiates with respect to it.
    """
    if not is_gradtrackingtensor(tensor) or maybe_get_level(tensor) != level:
        return tensor, False
    varies = tensor.requires_grad
    layers = _lowered_layers.layers
    if not varies and layers and layers[-1][0] == level:
        push_dynamic_layer_stack(layers[-1][1])
        try:
            varies = forward_ad.unpack_dual(tensor).tangent is not None
        finally:
            pop_dynamic_layer_stack()
    return get_unwrapped(tensor), varies


def with_batch_at(tensor: torch.Tensor, level: int, now: int) -> torch.Tensor:
    """`tensor`, which a `torch.func.vmap` at `level` maps over, as one that level `now` does."""
    if not is_batchedtensor(tensor) or maybe_get_level(tensor) != level:
        return tensor
    value, dim = _unwrap_batched(tensor, level)
    return value if dim is None else _add_batch_dim(value, dim, now)


def apply_to_functional(
    function: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]
) -> Any:
    """Apply an operator for the innermost level, a `torch.func.functionalize`."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    context = FunctorchFunctionalizeAPI(interpreter)
    with context.redispatch_to_next():
        result = function(tuple(context.unwrap_tensors(tuple(inputs))))
    return context.wrap_tensors(result)


# --- autograd ------------------------------------------------------------------------------------


def edges_that_run(edges: Sequence[tuple[Any, int]]) -> tuple[bool, ...]:
    """For each edge of the node whose backward runs, whether anybody waits for a gradient there.

    `ctx.needs_input_grad` says what requires a gradient, not what `torch.autograd.grad` was asked.
    """
    return tuple(node is not None and _will_run(node) for node, _ in edges)


def run_backward(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    *,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`, in which function modes stay on for what Python runs in the backward.

    The public function sets the innermost mode aside, so that a recomputation of
    `torch.utils.checkpoint` would run without it.
    """
    return _engine_run_backward(
        outputs, cotangents, create_graph, create_graph, inputs, True, accumulate_grad=False
    )


keeps_graph_after_backward: Callable[[], bool] = (
    torch._C._autograd._get_current_graph_task_keep_graph
)
"""Whether what the running backward pass reads may be read again (`retain_graph`)."""


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:  # for a leaf that torch.autograd.grad was asked for
        if "leaf node" not in str(error):
            raise
        return True


# --- tracing -------------------------------------------------------------------------------------

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def isolated_from_surroundings() -> Iterator[None]:
    """Run as if no `torch.func` level and no dispatch mode were active, with autocast kept."""
    with ExitStack() as stack:
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(disable_autocast_cache())
        stack.enter_context(_captures_suspended())
        stack.enter_context(dual_level_as_functorch_level())
        yield


@contextmanager
def _captures_suspended() -> Iterator[None]:
    """Without the function modes of traces in progress; a user's own modes stay."""
    modes = _get_current_function_mode_stack()
    if not any(isinstance(mode, TorchFunctionMetadataMode) for mode in modes):
        yield
        return
    for _ in modes:
        _pop_mode()
    kept = [mode for mode in modes if not isinstance(mode, TorchFunctionMetadataMode)]
    for mode in kept:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


@contextmanager
def saved_tensors_hooks_set_aside() -> Iterator[None]:
    """Without the `saved_tensors_hooks` of the surroundings, which expect real tensors.

    Hooks may be set in the block, also inside of `torch.func.grad`, which does not support them.
    """
    aside = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        aside.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if disabled is not None:
            torch._C._autograd._saved_tensors_hooks_disable(disabled)
        for pack, unpack in reversed(aside):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def has_saved_tensors_hooks() -> bool:
    """Whether `saved_tensors_hooks` of the surroundings are handed what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def dual_level_as_functorch_level() -> Iterator[None]:
    """Let `torch.func.jvp` run inside a `dual_level`, of which there can be only one."""
    inside = in_dual_level() and eager_transforms.JVP_NESTING == 0
    eager_transforms.JVP_NESTING += inside
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= inside


def new_fake_mode(shapes: ShapeEnv | None = None) -> FakeTensorMode:
    """A mode for fake tensors, as `make_fx` makes it: of fixed shapes unless `shapes` is given."""
    if shapes is not None:
        return _fake_mode_of_symbols(shapes)
    fixed = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_fallback_kernels=True, shape_env=fixed, static_shapes=True)


def _fake_mode_of_symbols(shapes: ShapeEnv) -> FakeTensorMode:
    """A mode in which operators find PyTorch's rules for symbolic sizes, written in Python.

    Turned on for a whole trace, as `make_fx` does, the rules would also take other operators apart
    than eager PyTorch does, before they are written down. (No subclass: the rules of higher-order
    operators are found by the very class of the mode.)
    """
    mode = FakeTensorMode(allow_fallback_kernels=True, shape_env=shapes)
    reference = weakref.ref(mode)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        with enable_python_dispatcher():
            return FakeTensorMode.dispatch(reference(), *args, **kwargs)  # type: ignore[arg-type]

    mode.dispatch = dispatch  # type: ignore[method-assign]
    return mode


@contextmanager
def proxy_modes(tracer: PythonKeyTracer, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Operators on fake tensors are written down by `tracer`, also the bodies of `torch.cond`."""
    # "fake" also where sizes are symbols: "symbolic" decomposes operators by other rules
    session = _MakefxTracer(None, "fake", False, False, False, False, True)
    session.fake_tensor_mode = fake_mode
    session.fx_tracer = tracer
    session._construct_modes_with_fx_tracer(tracer)
    with ExitStack() as stack:
        stack.enter_context(fake_mode)
        stack.enter_context(session.proxy_mode)
        stack.enter_context(_set_make_fx_tracer(session))
        stack.enter_context(_hidden_from_dynamo(session))
        stack.enter_context(_compiled_functions_uncompiled())
        stack.enter_context(_checkpoints_of_pytorch_called())
        yield


class _Called:
    """What `torch.utils.checkpoint` applies, as a plain call."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What `torch.utils.checkpoint` does around its function: it is called between the steps."""
    yield


@contextmanager
def _checkpoints_of_pytorch_called() -> Iterator[None]:
    """`torch.utils.checkpoint` calls its function: what is kept is decided of the whole graph.

    What it would compute again in the backward pass would draw other random numbers in a trace.
    """
    module = torch.utils.checkpoint
    names = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    before = [getattr(module, name) for name in names]
    for name, value in zip(names, (_nothing_around, _Called), strict=True):
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(module, name, value)


@contextmanager
def _compiled_functions_uncompiled() -> Iterator[None]:
    """What `torch.compile` made runs as the function that it was made of: Dynamo has a flag for it.

    It takes the flag back where it captures the bodies of `torch.cond` and its kin.
    """
    import torch._dynamo

    symbolic_trace = torch.fx._symbolic_trace
    before = symbolic_trace._is_fx_tracing_flag, symbolic_trace.is_fx_tracing
    symbolic_trace._is_fx_tracing_flag = True
    symbolic_trace.is_fx_tracing = lambda: False  # what others ask, who would refuse to run
    try:
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Using `torch.compile\\(module\\)` when there are global"
            )
            yield
    finally:
        symbolic_trace._is_fx_tracing_flag, symbolic_trace.is_fx_tracing = before


@contextmanager
def _hidden_from_dynamo(session: _MakefxTracer) -> Iterator[None]:
    """Keep Dynamo, which captures the bodies of `scan` and its kin, from tracing for `session`.

    It would use the fake tensors of two modes together (seen in PyTorch 2.13 also with `make_fx`).
    """
    from torch._dynamo.callback import callback_handler

    def hide(*_: Any) -> None:
        proxy_tensor._CURRENT_MAKE_FX_TRACER = None

    def show(*_: Any) -> None:
        proxy_tensor._CURRENT_MAKE_FX_TRACER = session

    callback_handler.register_start_callback(hide)
    callback_handler.register_end_callback(show)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(hide)
        callback_handler.remove_end_callback(show)


@cache
def let_modes_see_views_of_zeros() -> torch.library.Library:
    """Let `view` of an efficient zero tensor, of which forward mode makes many, reach fake tensors.

    Up to 2.13, PyTorch registers the kernel of dense tensors for it (other views fall through),
    which takes the fake tensor apart, so that `vmap` of `jvp` of `vmap` of `jvp` cannot be traced.
    For zeros that are not fake nothing changes: falling through leads to the same kernel.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("view", torch.library.fallthrough_kernel, "ZeroTensor")
    return library


def ragged_dim_of(nested: Any) -> int:
    """The dim of a jagged nested tensor whose size differs; the batch is dim 0."""
    return nested._ragged_idx  # type: ignore[no-any-return]


# --- sizes that vary -----------------------------------------------------------------------------

NAMES_IN_SIZES = dict(SYMPY_INTERP)
"""What the expressions that `printed_size` and `guards_of` give may name, besides symbols."""


def new_shape_env() -> ShapeEnv:
    """What knows symbols for sizes, and notes what a trace assumes of them.

    Equal sizes get symbols of their own: that a batch is as large as a sequence is long is chance.
    """
    return ShapeEnv(
        allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
    )


def new_symbol(shapes: ShapeEnv, size: int, name: str) -> torch.SymInt:
    """A symbol for a size above 1, which is `size` at the time of the trace."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = shapes.create_symbol(size, source, DimDynamic.DYNAMIC, constraint_dim=None)
    return shapes.create_symintnode(symbol, hint=size, source=source)  # type: ignore[return-value]


def depends_on_symbols(size: Any) -> bool:
    """Whether a size, or a comparison of sizes, is not the same for all values of symbols."""
    return isinstance(size, torch.SymInt | torch.SymBool) and bool(size.node.expr.free_symbols)


def shape_env_of(size: torch.SymInt) -> ShapeEnv:
    """What knows the symbols of `size`."""
    return size.node.shape_env  # type: ignore[no-any-return]


def num_guards(shapes: ShapeEnv) -> int:
    """How many things traces have assumed of the symbols so far."""
    return len(shapes.guards)


def guards_of(shapes: ShapeEnv, symbols: Sequence[torch.SymInt], names: Sequence[str]) -> str:
    """What traces have assumed of `symbols`, as an expression in which they go by `names`."""
    placeholders = [SymInt(SymNode(s.node._expr, shapes, int, s.node.hint)) for s in symbols]
    guards = shapes.produce_guards_expression(placeholders) or "True"
    for i, name in enumerate(names):
        guards = guards.replace(f"L['t{i}']", name)
    return guards


def settled_size(size: Any) -> Any:
    """`size`, as a number if a trace assumed that it is one."""
    constant = size.node.maybe_as_int()
    return size if constant is None else constant


def hint_of(size: Any) -> int:
    """What a size was when it was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def printed_size(size: Any, *, original: bool = False) -> str:
    """A size as an expression of Python; `original`: before traces assumed it equal to another."""
    return PythonPrinter().doprint(size.node._expr if original else size.node.expr)  # type: ignore[no-any-return]


def names_in_size(size: Any) -> set[str]:
    """The names of the symbols that a size depends on."""
    return {symbol.name for symbol in size.node.expr.free_symbols}


def innermost_proxy_mode() -> ProxyTorchDispatchMode | None:
    """The proxy mode of the innermost trace in progress in this thread, if any."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # type: ignore[no-any-return]


untraced = disable_proxy_modes_tracing
"""A context in which operators on fake tensors are written into no graph."""


def is_faking() -> bool:
    """Whether operators run on fake tensors, in a trace or outside any."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def track(tensors: Any, proxies: Any, tracer: PythonKeyTracer) -> Any:
    """Make `proxies` stand for `tensors` (a tree) in the trace of `tracer`."""
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
    """The proxy that stands for `tensor` in the trace of `tracer`, if it is tracked."""
    slot = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy


def is_active(mode: TorchFunctionMetadataMode) -> bool:
    """Whether `mode` is on this thread's stack of function modes."""
    return mode in _get_current_function_mode_stack()


without_function_modes = torch._C.DisableTorchFunction
"""A context in which no `TorchFunctionMode` sees anything."""

_apply_lock = threading.Lock()
FunctionHandler = Callable[[type, tuple[Any, ...], Callable[..., Any]], Any]
"""What is done instead of `cls.apply(*args)`, given the class, arguments and PyTorch's `apply`."""

_apply_handlers: dict[int, list[FunctionHandler]] = {}


@contextmanager
def function_calls_handled(handler: FunctionHandler) -> Iterator[None]:
    """Let `handler` do every `autograd.Function.apply` of this thread while in the block.

    `apply` goes round `__torch_function__`, so that a captured tensor handed to it would be missed
    by a `TorchFunctionMode`. It is looked up on `_SingleLevelFunction` at each call, where one
    attribute catches also those who hold a bound `apply`.
    """
    thread = threading.get_ident()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        plain = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
        handlers = _apply_handlers.get(threading.get_ident())
        return handlers[-1](cls, args, plain) if handlers else plain(*args, **kwargs)

    with _apply_lock:
        _apply_handlers.setdefault(thread, []).append(handler)
        _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _apply_lock:
            _apply_handlers[thread].pop()
            if not _apply_handlers[thread]:
                del _apply_handlers[thread]
            if not _apply_handlers:
                del _SingleLevelFunction.apply  # type: ignore[attr-defined]


_lifts: dict[int, list[Callable[[torch.Tensor], torch.Tensor]]] = {}
_WRAPPERS = (
    (eager_transforms, "_wrap_for_grad", vars(eager_transforms)["_wrap_for_grad"]),
    (functorch_vmap, "_add_batch_dim", vars(functorch_vmap)["_add_batch_dim"]),
)


def _lifting(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(tensor: torch.Tensor, *rest: Any) -> Any:
        lifts = _lifts.get(threading.get_ident())
        return wrapper(lifts[-1](tensor) if lifts else tensor, *rest)

    return wrap


@contextmanager
def levels_wrap_lifted(lift: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let levels of `torch.func` that are entered in the block, in this thread, wrap `lift(x)`.

    They wrap out of sight of a `TorchFunctionMode`, so that a captured tensor, handed to `grad` as
    an argument, would be met with its wrapper as another tensor.
    """
    thread = threading.get_ident()
    with _apply_lock:
        _lifts.setdefault(thread, []).append(lift)
        for module, name, wrapper in _WRAPPERS:
            setattr(module, name, _lifting(wrapper))
    try:
        yield
    finally:
        with _apply_lock:
            _lifts[thread].pop()
            if not _lifts[thread]:
                del _lifts[thread]
            if not _lifts:
                for module, name, wrapper in _WRAPPERS:
                    setattr(module, name, wrapper)


def is_function_of_user(cls: type) -> bool:
    """Whether `cls` is an `autograd.Function` with rules that no operator of a graph knows.

    Not those of PyTorch's own higher-order operators and custom operators, which are nodes with
    derivatives, nor those that `torch.func` makes for each of its levels.
    """
    internal = cls.__module__.startswith(("torchremat.", "torch._"))
    holds_rule = getattr(cls, "holds_rule_of_user", False)
    return issubclass(cls, torch.autograd.Function) and (holds_rule or not internal)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python prologue (3 us a call), for use outside `torch.func`."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]


# --- operators -----------------------------------------------------------------------------------


def schema_arguments(op: OpOverload) -> list[Any]:
    """The arguments in the schema of `op`: `name`, `type`, `kwarg_only`, `default_value`, ...

    `_schema` has no public name; torch's own documentation of custom operators reads it.
    """
    return list(op._schema.arguments)


def is_reduction(target: Any) -> bool:
    """Whether `target` is an operator of which PyTorch says that it reduces: a sum, a variance."""
    tag = getattr(torch.Tag, "reduction", None)
    return isinstance(target, OpOverload) and tag in target.tags


def boxed_call(op: OpOverload) -> Callable[..., Any]:
    """The operator as a builtin, without the Python prologue of `OpOverload.__call__`."""
    return op._op


below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which autograd records nothing and notes no views; half the price of `no_grad`."""


def is_below_autograd() -> bool:
    """Whether an operator that runs now is beneath autograd, which would record nothing."""
    key = DispatchKey.AutogradFunctionality  # what those of all devices have in common
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    return excluded


def dispatch_call(op: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    """Hand a call of `op` to its rule for where it stands, without what its `__call__` does."""
    return HigherOrderOperator.__call__(op, *args, **kwargs)


def register_simple_rules(op: HigherOrderOperator, run: Callable[..., Any]) -> None:
    """Give `op` its rules below autograd, all from `run`: dense, fake, traced, functionalised.

    Derivatives and batching stand above, in an `autograd.Function` that calls the op.
    """

    def dense(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def autograd(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return dispatch_call(op, *args, **kwargs)

    def fake(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    def traced(mode: ProxyTorchDispatchMode, *args: Any, **kwargs: Any) -> Any:
        tracer = mode.tracer
        proxies = [_as_proxy(a, tracer) for a in args]
        proxy = tracer.create_proxy("call_function", op, tuple(proxies), dict(kwargs))
        result = dispatch_call(op, *args, **kwargs)
        return track_tensor_tree(result, proxy, constant=None, tracer=tracer)

    def functionalized(context: Any, *args: Any, **kwargs: Any) -> Any:
        inner = context.unwrap_tensors(args)
        with context.redispatch_to_next():
            return context.wrap_tensors(dispatch_call(op, *inner, **kwargs))

    op.py_impl(DispatchKey.CompositeExplicitAutograd)(dense)
    op.py_impl(DispatchKey.Autograd)(autograd)
    op.py_impl(FakeTensorMode)(fake)
    op.py_impl(ProxyTorchDispatchMode)(traced)
    op.py_functionalize_impl(functionalized)


def register_derivative_rules(
    op: HigherOrderOperator,
    apply: Callable[..., Any],
    forward_rule: Callable[..., Any] | None = None,
) -> None:
    """Let autograd and the levels of `torch.func` see `op` as `apply`, an `autograd.Function`'s.

    It is called with the arguments of `op` where they stand: in a graph that is interpreted under
    a transformation, say. `forward_rule` serves `torch.func.jvp` instead, if given.
    """

    def autograd(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in args):
            return apply(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return dispatch_call(op, *args, **kwargs)

    def transformed(_: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(*args, **kwargs)

    def pushed_forward(_: Any, *args: Any, **kwargs: Any) -> Any:
        return (forward_rule or apply)(*args, **kwargs)

    op.py_kernels.pop(DispatchKey.Autograd, None)
    op.py_impl(DispatchKey.Autograd)(autograd)
    op.py_impl(TransformType.Grad)(transformed)
    op.py_impl(TransformType.Vmap)(transformed)
    op.py_impl(TransformType.Jvp)(pushed_forward)


def register_axis_rules(
    op: HigherOrderOperator,
    function: type[torch.autograd.Function] | None,
    batched: Callable[..., tuple[torch.Tensor, int | None]],
) -> None:
    """Give `op` its rules for autograd and for the levels of `torch.func`.

    Each level calls them on tensors of its own, also on those that it does not map over or
    differentiate, which the rules of an `autograd.Function` never see. `batched` takes the level,
    its size, the arguments as pairs of a tensor and the dimension mapped over, or `None`, and
    keywords; it gives such a pair. `function.apply` takes what runs `op` beneath, `op`, its
    keywords as a dict, and tensors. As in `register_function`, it is for operators that are linear,
    or linear in pieces; without it `op` is a constant.
    """

    def differentiate(run: Callable[..., Any], params: Any, tensors: Any) -> Any:
        if function is None:
            return run(*tensors)
        with enable_single_level_autograd_function():
            return direct_apply(function)(run, op, params, *tensors)

    def autograd(*tensors: torch.Tensor, **params: Any) -> Any:
        records, pushes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()

        def run(*tensors: torch.Tensor) -> Any:
            with (
                torch._C._AutoDispatchBelowAutograd(),
                torch.set_grad_enabled(records),
                forward_ad._set_fwd_grad_enabled(pushes),
            ):
                return dispatch_call(op, *tensors, **params)

        if in_dual_level() or (records and any(t.requires_grad for t in tensors)):
            return differentiate(run, params, tensors)
        return run(*tensors)

    def differentiated(interpreter: Any, *tensors: torch.Tensor, **params: Any) -> Any:
        level = interpreter.level()

        def run(*tensors: torch.Tensor) -> Any:
            inner = [_unwrap_for_grad(t, level) for t in tensors]
            with (
                torch.enable_grad(),
                forward_ad._set_fwd_grad_enabled(True),
                interpreter.lower(),
            ):
                output = dispatch_call(op, *inner, **params)
            return _wrap_for_grad(output, level)

        return differentiate(run, params, tensors)

    def mapped(interpreter: Any, *tensors: torch.Tensor, **params: Any) -> Any:
        level = interpreter.level()
        pairs = [_unwrap_batched(t, level) for t in tensors]
        with interpreter.lower():
            output, dim = batched(level, interpreter.batch_size(), *pairs, **params)
        return output if dim is None else _add_batch_dim(output, dim, level)

    op.py_kernels.pop(DispatchKey.Autograd, None)
    op.py_impl(DispatchKey.Autograd)(autograd)
    op.py_impl(TransformType.Grad)(differentiated)
    op.py_impl(TransformType.Jvp)(differentiated)
    op.py_impl(TransformType.Vmap)(mapped)


def without_dead_levels(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without the wrapper of a level of `torch.func` that has ended.

    PyTorch's own operators take it off by themselves.
    """
    return unwrap_if_dead(tensor)


def register_function(
    op: OpOverload,
    function: type[torch.autograd.Function],
    push: Callable[[list[Any], list[torch.Tensor | None]], Sequence[torch.Tensor]] | None = None,
) -> None:
    """Give a custom operator the derivatives of `function`, under autograd and `torch.func` alike.

    `function.apply` takes, before the arguments of `op`, what runs `op` beneath autograd; lists
    among the arguments are taken apart, and a list of results is a tuple. It needs
    `setup_context`, and `jvp` for tangents. What `torch.library.register_autograd` registers raises
    under `torch.func.grad` and gives tangents of zero. Each level of `torch.func` calls it on
    tensors of its own, so that no rule for levels is needed. `jvp` is for linear operators, or
    linear in pieces: PyTorch runs it without forward mode, so that forward over forward misses what
    comes of a coefficient in it that depends on an input. For others there is `push`, of the
    arguments and their tangents, made of operators that have derivatives themselves.
    """
    apply = direct_apply(function)
    gives_list = isinstance(op._schema.returns[0].type, torch._C.ListType)
    takes_list = any(isinstance(a.type, torch._C.ListType) for a in op._schema.arguments)

    def autograd(*args: Any) -> Any:
        records, pushes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        spec = None
        if takes_list:
            args, spec = tree_flatten(args)  # type: ignore[assignment]

        def call(*args: Any) -> Any:
            result = op(*args) if spec is None else op(*tree_unflatten(args, spec))
            return tuple(result) if gives_list else result

        def run(*args: Any) -> Any:
            # `apply` switches both off; outer levels of torch.func need them, and traces note them
            with (
                torch._C._AutoDispatchBelowAutograd(),
                torch.set_grad_enabled(records),
                forward_ad._set_fwd_grad_enabled(pushes),
            ):
                return call(*args)

        def record(*args: Any) -> Any:
            if records and any(getattr(a, "requires_grad", False) for a in args):
                with enable_single_level_autograd_function():
                    return apply(run, *args)
            return run(*args)

        if push is not None:
            is_dual = in_dual_level() and _has_tangents(args)
            result = _pushed(record, push, args) if is_dual else record(*args)
        elif in_dual_level():
            with enable_single_level_autograd_function():
                result = apply(run, *args)
        else:
            result = record(*args)
        return list(result) if gives_list else result

    namespace, name = op.name().partition(".")[0].split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)  # what it registers goes when it goes
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl(name, autograd, "Autograd", allow_override=True)


def _has_tangents(args: Sequence[Any]) -> bool:
    return has_tangents([a for a in args if isinstance(a, torch.Tensor)])


def _pushed(record: Callable[..., Any], push: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The results of an operator as dual numbers; the backward finds its inputs as such too."""
    with forward_ad._set_fwd_grad_enabled(False):
        outputs = record(*args)
    pairs = [forward_ad.unpack_dual(a) if isinstance(a, torch.Tensor) else (a, None) for a in args]
    tangents = push(*map(list, zip(*pairs, strict=True)))
    return tuple(forward_ad.make_dual(x, t) for x, t in zip(outputs, tangents, strict=True))


_libraries: list[torch.library.Library] = []


@contextmanager
def autograd_as_at_the_top() -> Iterator[None]:
    """Let the kernel of an operator differentiate by `torch.func`, below autograd and user's modes.

    What autograd records of its arguments, and their tangents, go no further than here.
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
    with isolated_from_surroundings():
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in keys:
            excluded = excluded.remove(key)
        views = torch._C.DispatchKeySet(DispatchKey.ADInplaceOrView)
        included = torch._C._dispatch_tls_local_include_set() | views
        with (
            torch._C._ForceDispatchKeyGuard(included, excluded),
            torch.no_grad(),
            forward_ad._set_fwd_grad_enabled(False),
        ):
            yield


FLASH_ATTENTION: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_ATTENTION_BACKWARD: OpOverload = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
flash_attention_on_cpu: Callable[..., tuple[torch.Tensor, torch.Tensor]]
flash_attention_on_cpu = FLASH_ATTENTION._op
"""`(q, k, v, dropout_p, is_causal, *, scale)`, `[batch, heads, length, dim]`: output, logsumexp.

It takes any strides with numbers side by side and rows that do not overlap, fewer heads of keys
than of queries, and lengths that differ. No size may be 0: it divides by the length of queries.
"""

flash_attention_on_cpu_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
flash_attention_on_cpu_backward = FLASH_ATTENTION_BACKWARD._op
"""`(cotangent, q, k, v, out, logsumexp, dropout_p, is_causal, *, scale)`: those of q, k and v."""


def ragged_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cuts: tuple[torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp `[heads, total]` of segments on a GPU, of halves.

    `cuts` are cumulative lengths in int32, `most` the greatest length; of queries and of keys. What
    `torch.nn.attention.varlen` calls, whose public function has no backward of its own.
    """
    results = torch.ops.aten._flash_attention_forward.default(
        q, k, v, *cuts, *most, 0.0, is_causal, False, scale=scale
    )
    return results[0], results[1]


def ragged_flash_attention_backward(
    cotangent: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    cuts: tuple[torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangents of `inputs` of `ragged_flash_attention`, added up in a fixed order."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=cotangent.device)
    unused = cotangent.new_empty(0)
    arguments = (cotangent, *inputs, *results, *cuts, *most, 0.0, is_causal, no_dropout, unused)
    is_set = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # else it adds to the cotangent of q by atomics
    try:
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        grads = torch.ops.aten._flash_attention_backward.default(*arguments, scale=scale)
    finally:
        torch.use_deterministic_algorithms(is_set, warn_only=only_warns)
    return grads


def _as_proxy(value: Any, tracer: Any) -> Any:
    if isinstance(value, torch.Tensor):
        slot = get_proxy_slot(value, tracer, None)
        return value if slot is None else slot.proxy
    if isinstance(value, torch.nn.Module):
        name = tracer.get_fresh_qualname("body_")
        tracer.root.register_module(name, value)
        return tracer.create_proxy("get_attr", name, (), {})
    return value


def in_dual_level() -> bool:
    """Whether forward-mode differentiation with dual numbers goes on."""
    return forward_ad._current_level >= 0


def tensor_guard(
    tensors: Sequence[torch.Tensor], dynamic_dims: Sequence[Sequence[int]]
) -> TensorGuards:
    """A guard whose `check(*tensors)` tells in C++ (0.1 us a tensor) whether all are as now.

    It compares type, dtype, device, shape, strides, `requires_grad` and dispatch keys, with
    those that modes and autocast add. Not compared are the sizes of `dynamic_dims`, and the strides
    of tensors that have such.
    """
    if not any(dynamic_dims):
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    sizes: list[Any] = []
    strides: list[Any] = []
    for tensor, dims in zip(tensors, dynamic_dims, strict=True):
        sizes.append([None if d in dims else n for d, n in enumerate(tensor.shape)])
        strides.append([None if dims else n for n in tensor.stride()])
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


SWITCHES = (
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
    vars(torch._C.TensorBase).get("__torch_function__"),
    torch._C._disabled_torch_function_impl,
)
"""The `__torch_function__` of tensors, and of subclasses without functions of their own."""

GLOBAL_MODULE_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)
"""Hooks that run on every module, by handle."""


@contextmanager
def module_trackers_set_aside() -> Iterator[None]:
    """A block in which PyTorch's own `ModuleTracker`s see no module run.

    `CommDebugMode` has one, which loses count of modules that run on traced tensors.
    """
    kept = [dict(hooks) for hooks in GLOBAL_MODULE_HOOKS]
    for hooks in GLOBAL_MODULE_HOOKS:
        for key, hook in list(hooks.items()):
            if type(getattr(hook, "__self__", None)).__module__ in _MODULES_OF_TRACKERS:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in zip(GLOBAL_MODULE_HOOKS, kept, strict=True):
            added = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update(before | added)


_MODULES_OF_TRACKERS = (
    "torch.utils.module_tracker",
    "torch.distributed._tools.mod_tracker",
    "torch.distributed.tensor.debug._comm_mode",
)


def is_transformed_or_watched() -> bool:
    """Whether `torch.func` or a dispatch mode is to see the operators that run."""
    return functorch_is_active() or torch._C._len_torch_dispatch_stack() > 0


def is_fake(value: Any) -> bool:
    """Whether `value` is a fake tensor."""
    return isinstance(value, FakeTensor)


# --- compilers: imported when one is asked for, which takes a second ------------------------------

MUST_SAVE = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
MUST_RECOMPUTE = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE

Partitioner = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]
"""Cuts a joint graph in a forward and a backward one."""


def is_compiled_by_inductor(fun: Any) -> bool:
    """Whether `fun`, a function or a module, is what `torch.compile` made with inductor."""
    context = getattr(fun, "dynamo_ctx", None)
    if context is not None:
        return getattr(context, "compiler_config", None) is not None
    config = getattr(fun, "get_compiler_config", None)
    return hasattr(fun, "_torchdynamo_orig_callable") and bool(config and config())


def out_of_compiler(reason: str) -> Callable[[_F], _F]:
    """Mark a function as one that Dynamo does not look into, nor what it calls, for `reason`.

    That is what `torch.compiler.disable` does too, which takes a second to import.
    """

    def mark(function: _F) -> _F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, skip)
        return function

    return mark


def is_in_stock_compiler() -> bool:
    """Whether `torch.compile` is at work on a graph that Dynamo has captured."""
    return torch._guards.TracingContext.try_get() is not None


def selective_policy_at_work() -> Any:
    """The policy of the selective checkpoint that is tracing its function, if any."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, torch.utils.checkpoint._CachingTorchDispatchMode):
            return mode.policy_fn
    return None


def node_in_compiler(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that computes `tensor` in the graph that AOTAutograd is tracing, if it is."""
    mode = innermost_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def written_inputs(module: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """Which outputs of AOTAutograd's joint graph are new values of inputs, by their positions."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    inputs = {node.meta.get("desc"): node for node in module.graph.find_nodes(op="placeholder")}
    (output,) = module.graph.find_nodes(op="output")
    return {
        i: inputs[desc.mutated_input]
        for i, desc in enumerate(output.meta["desc"])
        if isinstance(desc, InputMutationAOTOutput)
    }


def default_partition(
    module: torch.fx.GraphModule, inputs: Sequence[object], **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """PyTorch's partitioner that keeps what autograd keeps, but for what nodes are marked with."""
    from torch._functorch.partitioners import default_partition

    return default_partition(module, inputs, **options)


def simplify_for_inductor(
    module: torch.fx.GraphModule,
    merge: Callable[[torch.fx.Graph], torch.fx.Graph] | None = None,
) -> None:
    """What inductor and the minimum cut do to a joint graph in inductor's operators.

    What is computed twice is computed once, by `merge` if it is given, and patterns are replaced.
    """
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    joint_graph_passes(module)
    module.graph = (merge or merge_alike)(module.graph)
    module.recompile()


def min_cut_partition(
    module: torch.fx.GraphModule, inputs: Sequence[object], *, merges: bool = True, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """PyTorch's partitioner that keeps the least, if what can be fused is computed again.

    Unless `merges`, what is computed twice stays so.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(cse=config.cse and merges):
        return min_cut_rematerialization_partition(module, inputs, compiler="inductor", **options)


def inductor_partitioner(partition: Partitioner, key: str) -> Any:
    """`partition` in the form that inductor takes; compiled graphs are cached under `key`."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Custom(CustomPartitionerFn):
        def __call__(
            self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
            kwargs.pop("compiler", None)
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            return key

        def __reduce__(self) -> Any:  # of which inductor makes the key of its settings
            return str, (key,)

    return Custom()


def decomposition_table() -> Mapping[Any, Callable[..., Any]]:
    """How PyTorch says operators with others, in Python that knows symbols for sizes."""
    from torch._decomp import decomposition_table

    return decomposition_table


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """How inductor breaks operators into smaller ones."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_option_names() -> list[str]:
    """The names of inductor's settings."""
    import torch._inductor

    return torch._inductor.list_options()


def inductor_option_type(name: str) -> type | UnionType | None:
    """The type of one of inductor's settings, if `isinstance` can tell."""
    from torch._inductor import config

    kind = config.get_type(name)  # type: ignore[attr-defined]
    return kind if isinstance(kind, type | UnionType) and get_origin(kind) is None else None


def to_user(error: Exception, frame: FrameType) -> Exception:
    """`error` so that Dynamo hands it to the user as it is, its traceback from `frame` on."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    if not issubclass(kind, ShortenTraceback):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        error.__class__ = type(kind.__name__, (kind, ShortenTraceback), names)
        error.first_useful_frame = frame  # type: ignore[attr-defined]
    return error


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The settings that each mode of `torch.compile` stands for."""
    import torch._inductor

    return torch._inductor.list_mode_options()


_MayFuse = Callable[[list[AbstractSet[torch.fx.Node]], list[AbstractSet[torch.fx.Node]]], bool]


def has_triton() -> bool:
    """Whether Triton is installed, for which inductor makes its kernels for GPUs."""
    from torch.utils._triton import has_triton_package

    return has_triton_package()


def compile_fx(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    config: Mapping[str, Any],
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    keeps_as_cut: bool = False,
    may_fuse: _MayFuse | None = None,
) -> Callable[..., Any]:
    """Compile with AOTAutograd and inductor.

    `keeps_as_cut`: what the forward graph hands on is what the partition function says, also where
    convolutions read it, and not a copy in the layout that inductor gives them.

    `may_fuse` is asked whether two kernels may become one: for each it is given the nodes of the
    graph that every loop in it computes.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compiled(graph_module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        if keeps_as_cut:
            _give_inputs_as_they_lie(graph_module.graph)
        if keeps_as_cut and kwargs.get("is_backward"):
            _lay_out_convolutions(graph_module)
        with ExitStack() as stack:
            if may_fuse is not None:
                choices = _fusing(type(V.choices), may_fuse)
                stack.enter_context(V.set_choices_handler(choices))
            return compile_fx_inner(graph_module, *args, **kwargs)

    return compile_fx(  # type: ignore[return-value]
        module,
        inputs,
        compiled if keeps_as_cut or may_fuse is not None else compile_fx_inner,
        config_patches=dict(config),
        decompositions=decompositions,
    )


def _give_inputs_as_they_lie(graph: torch.fx.Graph) -> None:
    """Let inductor give those inputs of `graph` that are results too as they are.

    It else gives a copy with the channels last of each that a convolution reads, its weights among
    them, and the backward pass has that copy beside what is there anyway.
    """
    output = graph.output_node()
    results = enumerate(output.args[0])  # type: ignore[arg-type]
    inputs = {i for i, r in results if isinstance(r, torch.fx.Node) and r.op == "placeholder"}
    visible = output.meta.get("user_visible_output_idxs", ())
    output.meta["user_visible_output_idxs"] = sorted(inputs.union(visible))


def _lay_out_convolutions(module: torch.fx.GraphModule) -> None:
    """Let convolutions of a backward graph be traced in the layout that inductor gives them.

    Inductor lays out what convolutions read and write with the channels last. What is computed from
    that, and read by the gradient of a convolution, it makes once more as it was traced, which is
    by the layout of the weights: of these it makes copies in any case.
    """
    from torch._inductor.graph import GraphLowering

    if not GraphLowering.decide_layout_opt(module, is_inference=False):
        return
    graph, aten = module.graph, torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        weight = node.args[1]
        if weight.meta["val"].dim() == 4:
            with graph.inserting_before(node):
                copy = graph.call_function(
                    aten.clone.default, (weight,), {"memory_format": torch.channels_last}
                )
            value = weight.meta["val"].to(memory_format=torch.channels_last)
            copy.meta = {**weight.meta, "val": value}
            node.update_arg(1, copy)


def _fusing(base: Any, may_fuse: _MayFuse) -> Any:
    """What `base` decides for inductor, but for kernels that may not be fused."""

    class Choices(base):  # type: ignore[misc]
        @staticmethod
        def can_fuse(scheduler: Any, one: Any, other: Any, score: int) -> bool:
            return may_fuse(_nodes_in(one), _nodes_in(other)) and base.can_fuse(
                scheduler, one, other, score
            )

    return Choices()


def _nodes_in(kernel: Any) -> list[AbstractSet[torch.fx.Node]]:
    loops = (loop.node for loop in kernel.get_nodes())
    return [loop.get_origins() for loop in loops if loop is not None]


def aot_autograd(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    compiler: Callable[[torch.fx.GraphModule], Callable[[list[Any]], Sequence[Any]]],
    partition: Partitioner,
) -> Callable[..., Any]:
    """Trace with AOTAutograd, cut with `partition`, and run what `compiler` makes of each half.

    That is a function of one list of inputs, which it empties.
    """
    from torch._dynamo.backends.common import aot_autograd

    def boxed(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        run = compiler(graph)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=boxed, partition_fn=partition)(module, inputs)


def decompose(
    module: torch.fx.GraphModule, inputs: Sequence[Any], table: Mapping[Any, Any]
) -> torch.fx.GraphModule:
    """Trace `module` again on fake `inputs`, with operators broken up as `table` says."""
    from torch._guards import detect_fake_mode

    fake_mode = detect_fake_mode(inputs)
    interpret = torch.fx.Interpreter(module).run
    with (
        ExitStack() if fake_mode is None else fake_mode,
        torch.fx.traceback.preserve_node_meta(),
        enable_python_dispatcher(),
        torch.no_grad(),
    ):
        return proxy_tensor.make_fx(interpret, decomposition_table=table)(*inputs)


def merge_alike(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy of `graph` in which what is computed twice is computed once; no random numbers."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def compile_with_inductor(
    module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
    """Compile a graph of ATen operators for `inputs`, fake tensors, and the code that was made.

    The function takes its inputs as one list, which it empties. Random numbers are those that
    the operators draw by themselves.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs
        ]
    with (
        config.patch(fallback_random=True),
        torch.no_grad(),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
    ):
        plain = decompose(module, fakes, inductor_decompositions())
        joint_graph_passes(plain)
        output = plain.graph.output_node()  # a backward graph reads them as they were traced
        output.meta["user_visible_output_idxs"] = list(range(len(list(output.args[0]))))  # type: ignore[arg-type]
        run = compile_fx_inner(plain, fakes, is_inference=True)
    return run, getattr(run, "source_code", "")


# --- who uses a tensor's memory ------------------------------------------------------------------


def is_view(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a view of another, as autograd knows it."""
    return tensor._is_view()


def tensor_uses(tensor: torch.Tensor) -> int:
    """How many refer to `tensor` in C++: 1 unless views or nodes of autograd's graph do, too."""
    return tensor._use_count()  # type: ignore[attr-defined,no-any-return]


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors, arrays and the like have the storage of `tensor`: 1 if only it has."""
    storage = tensor.untyped_storage()  # one use more
    return torch._C._storage_Use_Count(storage._cdata) - 1


def without_memory(cls: type[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A tensor of class `cls`, which has a `__torch_dispatch__`: the metadata of `like` alone.

    C++ code that asks for its memory raises `RuntimeError`: DLPack would hand on a null pointer.
    """
    tensor = torch.Tensor._make_wrapper_subclass(
        cls, like.shape, like.stride(), dtype=like.dtype, device=like.device
    )
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


swap_memory: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
"""Let two tensors exchange all but their Python classes and attributes."""


# --- batching rules ------------------------------------------------------------------------------


def replace_batching_rule(op: OpOverload, kernel: Callable[..., Any]) -> torch.library.Library:
    """Have `kernel` called where `op` is mapped by `vmap`, until `restore_batching_rule`.

    It is called with wrapped tensors, at the innermost level, which is a `vmap`.
    """
    library = torch.library.Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(op, kernel, "FuncTorchBatched", allow_override=True)
    return library


def restore_batching_rule(library: torch.library.Library) -> None:
    """Undo `replace_batching_rule`."""
    library._destroy()


@dataclass(frozen=True)
class VmapLevel:
    """A level of `vmap`: its number, and the size of its axis."""

    number: int
    size: int


@contextmanager
def at_level_below() -> Iterator[VmapLevel]:
    """In a batching rule: what runs in the block runs below its level, which is yielded."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    keys = torch._C.DispatchKeySet(DispatchKey.FuncTorchBatched)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield VmapLevel(interpreter.level(), interpreter.batch_size())


unwrap_batched_tensor: Callable[[torch.Tensor, int], tuple[torch.Tensor, int | None]] = (
    torch._C._functorch._unwrap_batched
)
add_batch_dim: Callable[[torch.Tensor, int, int], torch.Tensor] = torch._C._functorch._add_batch_dim


def asks_for_value(error: RuntimeError) -> bool:
    """Whether `error` is that of `vmap` where Python asks for the value of a mapped tensor."""
    return "It looks like you're calling .item() on a Tensor" in str(error)


def needs_mapped_value(error: RuntimeError) -> bool:
    """Whether `error` says that Python, or the size of a result, depends on a mapped tensor."""
    return any(text in str(error) for text in _NEEDS_MAPPED_VALUE)


_NEEDS_MAPPED_VALUE = (
    "vmap: It looks like you're",
    "vmap: We do not support batching operators that can",  # nonzero, a mask as an index
    "Cannot access data pointer of Tensor that doesn't have storage",  # tolist, numpy
)


# --- operators without a batching rule -----------------------------------------------------------

LOOP_WARNING = "There is a performance drop because we have not yet implemented"
"""How the warning begins that PyTorch gives where it maps an operator by a loop."""


def dispatch_restored() -> AbstractContextManager[None]:
    """After the block the dispatcher's state is as before it.

    What fails inside of several levels of `torch.func` leaves PyTorch 2.13 in another, once the
    error that it raised is forgotten: catch it inside the block.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def looped_operator(warning: str) -> str | None:
    """The operator that such a warning is about."""
    if not warning.startswith(LOOP_WARNING):
        return None
    return warning.partition("batching rule for ")[2].partition(" ")[0].rstrip(".")

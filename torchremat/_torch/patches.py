"""Every assignment to an attribute of PyTorch: the table `PATCHES`, and the blocks that enter it.

A replacement stands in PyTorch while some thread is in a block that needs it, and is removed with
the last. It reads what *this* thread has entered, and otherwise does what it replaces, so that
other threads see nothing. Rows for which that is impossible say who sees what.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.fx.experimental.proxy_tensor import _MakefxTracer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .engine import (
    APPLIES_IN_C,
    FunctionHandler,
    appear_defined,
    bind_and_divert,
    handle_apply,
    in_dual_level,
    receive_diverted,
)
from .kernels.gpu import Gpu
from .kernels.gpu_choice import choose_as_gpu
from .replacements import (
    HAS_CONTEXT_FOR_COMPILED,
    AttributeReader,
    Maker,
    Nesting,
    TracingFlag,
    Values,
    autocast_on_cpu,
    begin_session,
    check_unless_standing_in,
    handle_checkpoint,
    hide_class_of_fakes,
    ignore_module,
    ignore_own_hooks,
    lift_first,
    map_known,
    read_length,
    read_own_tracer,
    run_compiled_functions_eagerly,
    set_own_tracer,
    share_flag,
    wrap_trackers,
)


@dataclass(frozen=True, eq=False)
class Patch:
    """An attribute of PyTorch that the library replaces, or a registry that it writes to."""

    owner: str
    """The module, or `module:class`."""

    name: str
    why: str
    since: str
    """The first PyTorch version that needs it; 2.11 is the oldest supported one."""

    threads: str = "thread-local"
    until: str = ""
    """The last PyTorch version that needs it, if a newer one does without."""

    make: Maker | None = None
    """Without it a function named in `why` makes the change."""


# --- the table -----------------------------------------------------------------------------------

_PROXY = "torch.fx.experimental.proxy_tensor"
_FX = "torch.fx._symbolic_trace"

_FUNCTION = "torch.autograd.function"
_APPLY = Patch(
    f"{_FUNCTION}:_SingleLevelFunction", "apply",
    "`apply` goes round `__torch_function__`, so that a TorchFunctionMode would miss a captured "
    "tensor. It is looked up here at each call, also by those who hold a bound `apply`.",
    "2.11", until="2.13", make=handle_apply,
)  # fmt: skip
_BIND = Patch(
    _FUNCTION, "_bind_default_args",
    "As `apply`, which is a function in C since 2.14. It looks this up at each call; what stands "
    "here lets it go on with `_call_custom_function_call`.",
    "2.14", make=bind_and_divert,
)  # fmt: skip
_CALL_CUSTOM = Patch(
    _FUNCTION, "_call_custom_function_call",
    "The call that `_bind_default_args` has diverted arrives here.",
    "2.14", make=receive_diverted,
)  # fmt: skip
_SETUP_CONTEXT = Patch(
    f"{_FUNCTION}:_SingleLevelFunction", "setup_context",
    "`apply` binds only the arguments of functions whose `setup_context` is another one.",
    "2.14", make=appear_defined,
)  # fmt: skip
_APPLY_PATCHES = (_BIND, _CALL_CUSTOM, _SETUP_CONTEXT) if APPLIES_IN_C else (_APPLY,)
_WRAP_FOR_GRAD = Patch(
    "torch._functorch.eager_transforms", "_wrap_for_grad",
    "Levels of torch.func wrap out of sight of a TorchFunctionMode, so that a captured tensor "
    "passed to `grad` would be met, with its wrapper, as another tensor.",
    "2.11", make=lift_first,
)  # fmt: skip
_ADD_BATCH_DIM = Patch(
    "torch._functorch.vmap", "_add_batch_dim",
    "As `_wrap_for_grad`, for `vmap`.",
    "2.11", make=lift_first,
)  # fmt: skip
_CHECKPOINT = Patch(
    "torch.utils.checkpoint:checkpoint.__wrapped__", "__dynamo_disable",
    "In a trace a handler does what `torch.utils.checkpoint` would: what is saved is decided of "
    "the whole graph. PyTorch looks this attribute up at each call, whoever holds `checkpoint`.",
    "2.11", make=handle_checkpoint,
)  # fmt: skip
_FX_FLAG = Patch(
    _FX, "_is_fx_tracing_flag",
    "In a trace what `torch.compile` made runs as the function it was made of: Dynamo has a flag "
    "for that. Since 2.14 it has a context, which `enter_trace` enters.",
    "2.11", until="2.13", make=TracingFlag,
)  # fmt: skip
_FX_MODULE = Patch(
    _FX, "__class__",
    "Dynamo takes the flag back while it captures the bodies of `torch.cond` and its kin.",
    "2.11", until="2.13", make=lambda plain, _: share_flag(plain, _values_of(_FX_FLAG)),
)  # fmt: skip
_NESTED_FX = Patch(
    "torch._dynamo.config", "error_on_nested_fx_trace",
    "With that flag Dynamo raises unless this setting, entered by `enter_trace`, is off.",
    "2.11", "thread-local in PyTorch 2.13, where settings are context variables", until="2.13",
)  # fmt: skip
_GLOBAL_HOOKS = Patch(
    "torch.nn.modules.module", "_has_any_global_hook",
    "`torch.compile(module)` warns of global hooks; those of a trace are not the user's, and "
    "modules of other threads do not run them.",
    "2.11", "thread-local; other threads no longer count the hooks of a trace",
    make=ignore_own_hooks,
)  # fmt: skip
_TRACER = Patch(
    _PROXY, "__class__",
    "Operators with bodies trace them with `_CURRENT_MAKE_FX_TRACER`, a global of the module.",
    "2.11", make=read_own_tracer,
)  # fmt: skip
_SET_TRACER = Patch(
    _PROXY, "_set_make_fx_tracer",
    "A `make_fx` inside of a trace sets that global, and is the innermost.",
    "2.11", make=lambda plain, _: set_own_tracer(plain, _values_of(_TRACER)),
)  # fmt: skip
_VMAPIFY = Patch(
    "torch._functorch.autograd_function", "vmapify_autograd_function",
    "A mapped `autograd.Function` runs on a level of its own, and its backward too, later on: both "
    "need the names of axes, which `let_functions_know_axes` gives them.",
    "2.11", "for good; what it is given returns the function where this thread has no named axis",
    make=lambda plain, _: map_known(plain, lambda: _knowers),
)  # fmt: skip
_JVP_NESTING = Patch(
    "torch._functorch.eager_transforms", "JVP_NESTING",
    "There is only one dual level: `dual_level_as_functorch_level` lets `torch.func.jvp` run "
    "inside of one that the user entered.",
    "2.11", make=Nesting,
)  # fmt: skip
_TRACKERS = Patch(
    "torch.nn.modules.module", "_global_forward_hooks, _global_forward_pre_hooks, ...",
    "`CommDebugMode` has a `ModuleTracker`, which loses count of modules that run on traced "
    "tensors: `set_module_trackers_aside` wraps its hooks.",
    "2.11",
)  # fmt: skip
_MODULE_HOOKS = Patch(
    "torch.nn.modules.module", "register_module_forward_hook, register_module_forward_pre_hook",
    "A trace follows which modules run, by `call_around_modules`.",
    "2.11", "thread-local; in other threads the hooks return at once, and Dynamo sees none",
)  # fmt: skip
_READS = Patch(
    "torch.nn.modules.module:Module", "__getattribute__",
    "`note_attribute_reads` tells which attributes of modules a trace depends on: the others need "
    "no guard, and may differ between layers that share a trace.",
    "2.11", make=AttributeReader,
)  # fmt: skip
_VIEW_OF_ZEROS = Patch(
    "torch.ops.aten.view", "ZeroTensor",
    "`let_modes_see_views_of_zeros` lets fake tensors see views of zeros: PyTorch registers the "
    "kernel of dense tensors. It is registered by torch.library.",
    "2.11", "for good; zeros that are not fake fall through to the same kernel",
)  # fmt: skip
_BATCHING_RULES = Patch(
    "torch.ops.*", "FuncTorchBatched",
    "`replace_batching_rule` serves rules that a user registers, and ours for want of a right one.",
    "2.11", "process-wide by request: rules hold in all threads until they are deleted. They are "
    "registered by torch.library, and call PyTorch's own kernel where a thread has no rule",
)  # fmt: skip
_DETERMINISTIC = Patch(
    "torch", "use_deterministic_algorithms",
    "Flash attention on a GPU else adds to the cotangent of q by atomics; `be_deterministic`.",
    "2.11", "process-wide: the kernel reads a flag of the process, has no argument for it, and is "
    "not deterministic with `warn_only`. Others see it while one kernel is launched",
)  # fmt: skip

_GPU_KERNELS = Patch(
    "torch.library", "Library",
    "Operators composed of others take those of the CPU, where a trace on the CPU stands for a GPU "
    "that is not here; `stand_for_gpu`.",
    "2.11", "thread-local: others meet a kernel of the dispatcher that calls PyTorch's own",
)  # fmt: skip
_FLEX_DEVICE = Patch(
    "torch.nn.attention.flex_attention", "_validate_device",
    "It refuses gradients on the CPU, also where a trace stands for a GPU that has them.",
    "2.11", make=check_unless_standing_in,
)  # fmt: skip

_AUTOCAST = Patch(
    "torch.amp.autocast_mode:autocast", "__init__",
    "That of `cuda` is off where there is no GPU. Tensors that stand for some of one take that of "
    "the CPU, which has the casts of a GPU then.",
    "2.11", make=autocast_on_cpu,
)  # fmt: skip

_FAKE_CLASS = Patch(
    "torch._subclasses", "__class__", "Libraries that find fake tensors make needless masks.",
    "2.11", make=hide_class_of_fakes,
)  # fmt: skip
_LEN = Patch("builtins", "len", "`len` makes a number of a symbol.", "2.11", make=read_length)

EVERY_PATCH = (
    _APPLY, _BIND, _CALL_CUSTOM, _SETUP_CONTEXT, _WRAP_FOR_GRAD, _ADD_BATCH_DIM, _CHECKPOINT,
    _FX_FLAG, _FX_MODULE, _NESTED_FX, _GLOBAL_HOOKS, _TRACER, _SET_TRACER, _VMAPIFY, _JVP_NESTING,
    _TRACKERS, _MODULE_HOOKS, _READS, _VIEW_OF_ZEROS, _BATCHING_RULES, _DETERMINISTIC,
    _GPU_KERNELS, _FLEX_DEVICE, _AUTOCAST, _FAKE_CLASS, _LEN,
)  # fmt: skip
"""The table for all supported versions of PyTorch."""

_FLAG_PATCHES = () if HAS_CONTEXT_FOR_COMPILED else (_FX_FLAG, _FX_MODULE)
_SETTINGS = () if HAS_CONTEXT_FOR_COMPILED else (_NESTED_FX,)

PATCHES = (
    *_APPLY_PATCHES, _WRAP_FOR_GRAD, _ADD_BATCH_DIM, _CHECKPOINT, *_FLAG_PATCHES, *_SETTINGS,
    _GLOBAL_HOOKS, _TRACER, _SET_TRACER, _VMAPIFY, _JVP_NESTING, _TRACKERS, _MODULE_HOOKS,
    _READS, _VIEW_OF_ZEROS, _BATCHING_RULES, _DETERMINISTIC,
    _GPU_KERNELS, _FLEX_DEVICE, _AUTOCAST, _FAKE_CLASS, _LEN,
)  # fmt: skip
"""The rows of the installed version."""

# --- how they are entered ------------------------------------------------------------------------


class _Entered(threading.local):
    def __init__(self) -> None:
        self.values: defaultdict[Patch, list[Any]] = defaultdict(list)


_entered = _Entered()
_lock = threading.RLock()
_num_blocks: defaultdict[Patch, int] = defaultdict(int)
_undo: dict[Patch, Callable[[], None]] = {}


def _values_of(patch: Patch) -> Values:
    return lambda: _entered.values[patch]


@contextmanager
def _enter(values: Mapping[Patch, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for patch, value in values.items():
            _install(patch)
            stack.callback(_remove, patch)
            entered = _entered.values[patch]
            entered.append(value)
            stack.callback(entered.pop)
        yield


def _install(patch: Patch) -> None:
    with _lock:
        if _num_blocks[patch] == 0:
            _undo[patch] = _replace(patch)
        _num_blocks[patch] += 1


def _remove(patch: Patch) -> None:
    with _lock:
        _num_blocks[patch] -= 1
        if _num_blocks[patch] == 0:
            _undo.pop(patch)()


def _replace(patch: Patch) -> Callable[[], None]:
    if patch is _TRACKERS:
        return wrap_trackers(_values_of(_TRACKERS))
    owner, name, make = resolve_name(patch.owner), patch.name, patch.make
    assert make is not None
    plain = getattr(owner, name, None)
    is_inherited = name not in vars(owner) and name != "__class__"  # which no `vars` has
    before = vars(owner).get(name, plain)  # not `plain`, which is bound, of a class method
    made = make(plain, _values_of(patch))
    setattr(owner, name, made)

    def undo() -> None:
        if is_inherited:
            delattr(owner, name)
        elif isinstance(made, Nesting):  # levels of other threads count on
            setattr(owner, name, vars(owner)[name].plain)
        elif not isinstance(made, TracingFlag):
            setattr(owner, name, before)
        elif vars(owner)[name] is made:  # else `fx.Tracer.trace` of a thread has it, and restores
            setattr(owner, name, made.plain)

    return undo


# --- blocks --------------------------------------------------------------------------------------


@contextmanager
def enter_trace(session: _MakefxTracer) -> Iterator[None]:
    """Let Python that runs in the block be traced by `session`: all patches of a trace."""
    values: dict[Patch, Any] = dict.fromkeys((*_FLAG_PATCHES, _GLOBAL_HOOKS, _SET_TRACER), True)
    values[_TRACER] = begin_session(session)
    with _enter(values), run_compiled_functions_eagerly():
        yield


CheckpointHandler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], Any]
"""Is called in place of a checkpoint: with function, arguments, keywords and `context_fn`."""


def handle_checkpoints(handler: CheckpointHandler) -> AbstractContextManager[None]:
    """Let `handler` do every `torch.utils.checkpoint` of this thread while in the block."""
    return _enter({_CHECKPOINT: handler})


def handle_function_calls(handler: FunctionHandler) -> AbstractContextManager[None]:
    """Let `handler` do every `autograd.Function.apply` of this thread while in the block."""
    return _enter(dict.fromkeys(_APPLY_PATCHES, handler))


def lift_before_wrapping(
    lift: Callable[[torch.Tensor], torch.Tensor],
) -> AbstractContextManager[None]:
    """Let levels of `torch.func` that this thread enters in the block wrap `lift(x)`."""
    return _enter({_WRAP_FOR_GRAD: lift, _ADD_BATCH_DIM: lift})


def set_module_trackers_aside() -> AbstractContextManager[None]:
    """Hide the modules that this thread runs in the block from PyTorch's own `ModuleTracker`s."""
    return _enter({_TRACKERS: True})


@contextmanager
def call_around_modules(
    enter: Callable[[torch.nn.Module, Any], None],
    leave: Callable[[torch.nn.Module, Any, Any], None],
) -> Iterator[None]:
    """Call `enter(module, args)` and `leave(module, args, output)` around what this thread runs."""
    thread = threading.get_ident()

    def before(module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            enter(module, args)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            leave(module, args, output)

    for hook in (before, after):
        hook._torchdynamo_inline = ignore_module  # type: ignore[union-attr]
    handles = (
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def note_attribute_reads(note: Callable[[Any, str], None]) -> AbstractContextManager[None]:
    """Call `note(module, name)` for each attribute of a module that this thread reads."""
    return _enter({_READS: note})


def hide_fakes(asked: list[str] | None) -> AbstractContextManager[None]:
    """Hide the class, and add the files that ask for it to `asked`; show it if that is `None`."""
    return _enter({_FAKE_CLASS: asked})


@contextmanager
def stand_for_gpu(gpu: Gpu) -> Iterator[None]:
    """Let operators on fake CPU tensors take the kernels of `gpu`, in this thread."""
    with _enter({_FLEX_DEVICE: True, _AUTOCAST: True}), choose_as_gpu(gpu):
        yield


def symbolic_lengths() -> AbstractContextManager[None]:
    return _enter({_LEN: True})


@contextmanager
def dual_level_as_functorch_level() -> Iterator[None]:
    """Let `torch.func.jvp` run inside a `dual_level`, of which there can be only one."""
    inside = in_dual_level() and eager_transforms.JVP_NESTING == 0
    with _enter({_JVP_NESTING: True}) if inside else nullcontext():
        yield


@contextmanager
def be_deterministic() -> Iterator[None]:
    """Let kernels that are launched in the block be deterministic, one thread at a time."""
    with _lock:
        is_set = torch.are_deterministic_algorithms_enabled()
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(is_set, warn_only=only_warns)


# --- for good, or until they are restored --------------------------------------------------------

_knowers: list[Callable[[type], type]] = []


def let_functions_know_axes(known: Callable[[type], type]) -> None:
    """Let `torch.vmap` map `known(function)` in place of each `autograd.Function` without a rule.

    Its forward runs on a level of its own then, and so does its backward, later on. `known` is
    called in all threads.
    """
    with _lock:
        if known not in _knowers:
            _knowers.append(known)
        if _num_blocks[_VMAPIFY] == 0:
            _install(_VMAPIFY)

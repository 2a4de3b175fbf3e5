"""For each row of `PATCHES`: the public way that was tried, and the loss without the row."""

from typing import NamedTuple


class Alternative(NamedTuple):
    """The other texts of a patch are in its row."""

    public: str
    without: str


_NO_MODE = "A TorchFunctionMode is not called by `apply`, and neither is a TorchDispatchMode."
_NO_FUNCTION = "An autograd function would be differentiated by tensors of the outside world."
_LEVELS = (
    "A TorchFunctionMode sees the wrapper at its first operator. There it cannot tell a level of "
    "the trace from one outside, which has the same number."
)
_EAGER = "torch.compiler.set_stance('force_eager') is for all threads."
_TRACERS = "make_fx sets it too, for all threads; its session wants all inputs before the trace."
_HOOKS = "Hooks of all modules are the public way to see modules run; none is of one thread."

ALTERNATIVES = {
    "torch.autograd.function:_SingleLevelFunction.apply": Alternative(_NO_MODE, _NO_FUNCTION),
    "torch.autograd.function._bind_default_args": Alternative(_NO_MODE, _NO_FUNCTION),
    "torch.autograd.function._call_custom_function_call": Alternative(_NO_MODE, _NO_FUNCTION),
    "torch.autograd.function:_SingleLevelFunction.setup_context": Alternative(
        _NO_MODE, _NO_FUNCTION
    ),
    "torch._functorch.eager_transforms._wrap_for_grad": Alternative(
        _LEVELS, "`grad` of a captured tensor in a checkpoint would be by another tensor."
    ),
    "torch._functorch.vmap._add_batch_dim": Alternative(
        _LEVELS, "`vmap` of a captured tensor in a checkpoint would capture each wrapper."
    ),
    "torch.utils.checkpoint:checkpoint.__wrapped__.__dynamo_disable": Alternative(
        "set_checkpoint_early_stop and context_fn change how it recomputes, not whether.",
        "A trace would hold both computations, with different random numbers.",
    ),
    "torch.fx._symbolic_trace._is_fx_tracing_flag": Alternative(
        _EAGER, "A compiled function in a trace would raise."
    ),
    "torch.fx._symbolic_trace.__class__": Alternative(
        _EAGER, "torch.cond in a trace would change the flag of other threads."
    ),
    "torch._dynamo.config.error_on_nested_fx_trace": Alternative(
        _EAGER, "A compiled function in a trace would raise."
    ),
    "torch.nn.modules.module._has_any_global_hook": Alternative(
        _HOOKS, "A compiled module would warn of hooks which are not the user's."
    ),
    "torch.fx.experimental.proxy_tensor.__class__": Alternative(
        _TRACERS, "torch.cond, while_loop and scan in a checkpoint would raise."
    ),
    "torch.fx.experimental.proxy_tensor._set_make_fx_tracer": Alternative(
        _TRACERS, "make_fx with torch.cond, in a checkpoint, would write into the wrong graph."
    ),
    "torch._functorch.autograd_function.vmapify_autograd_function": Alternative(
        "A TorchFunctionMode sees the call of the function, but not its later backward pass, and "
        "slows each operator under vmap.",
        "A collective in an autograd function would not know its axis.",
    ),
    "torch._functorch.eager_transforms.JVP_NESTING": Alternative(
        "forward_ad.dual_level cannot be nested, nor left for a while.",
        "torch.func.jvp in a checkpoint in a dual level would raise.",
    ),
    "torch.nn.modules.module._global_forward_hooks, _global_forward_pre_hooks, ...": Alternative(
        "A tracker has no switch; what it counted before a trace is in private attributes.",
        "CommDebugMode would count the modules of traces.",
    ),
    "torch.nn.modules.module.register_module_forward_hook, register_module_forward_pre_hook": (
        Alternative(_HOOKS, "Nodes would not know their module; policies by module would not work.")
    ),
    "torch.nn.modules.module:Module.__getattribute__": Alternative(
        "A module calls `__getattr__` only for what its `__dict__` lacks.",
        "Alike layers that differ in an attribute which nothing reads would not share a trace.",
    ),
    "torch.ops.aten.view.ZeroTensor": Alternative(
        "It is registered by torch.library, which is public.",
        "`vmap` of `jvp` of `vmap` of `jvp` could not be traced.",
    ),
    "torch.ops.*.FuncTorchBatched": Alternative(
        "It is registered by torch.library, which is public.", "No batching rules of users."
    ),
    "torch._subclasses.__class__": Alternative(
        "None: what is asked is the class of the tensor, which PyTorch gives no way to choose.",
        "A wrapped language model would make masks, and lose the fast kernels of attention.",
    ),
    "torch.library.Library": Alternative(
        "It is registered by torch.library, which is public.",
        "A plan for a GPU that is not here would have the operators of the CPU.",
    ),
    "torch.nn.attention.flex_attention._validate_device": Alternative(
        "None: the function has no argument for it.",
        "flex_attention could not be planned on a machine without a GPU.",
    ),
    "torch.amp.autocast_mode:autocast.__init__": Alternative(
        "The class is public, and asks whether there is a GPU.",
        "A step under the autocast of a GPU that is not here would be planned in float32.",
    ),
    "builtins.len": Alternative(
        "No hook of PyTorch is asked: Python makes a number of what `__len__` returns.",
        "`len(x)` in a ragged batch would be one number for all elements.",
    ),
    "torch.use_deterministic_algorithms": Alternative(
        "The function is public. The operator has no argument for it.",
        "A ragged backward pass on a GPU would give other bits each time.",
    ),
}
"""By the owner and name of the patch."""

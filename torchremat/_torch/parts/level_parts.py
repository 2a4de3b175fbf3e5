"""Private parts that levels of `torch.func` and forward mode need."""

from .part import PrivatePart

LEVELS = (
    PrivatePart(
        "torch._C._functorch: get_interpreter_stack, TransformType",
        "To know which levels of torch.func are active, how many, and of which kind.",
        "None: torch.func does not say that one of its levels is active.",
        "A checkpoint inside of grad, vmap or jvp could not follow its rule.",
    ),
    PrivatePart(
        "torch._C: _are_functorch_transforms_active",
        "To ask at each call whether torch.func is active; 0.09 us.",
        "None. The stack of levels gives the same answer through a Python function.",
        "Each call of a checkpoint would be slower.",
    ),
    PrivatePart(
        "torch._functorch.pyfunctorch: retrieve_current_functorch_interpreter",
        "The innermost level, for the rule of an operator there: its number, size, randomness.",
        "Rules of autograd.Function (vmap, jvp) see their own inputs only, not captured tensors.",
        "Checkpoints would have no rules for torch.func.",
    ),
    PrivatePart(
        "torch._C._functorch: _wrap_for_grad, _unwrap_for_grad, unwrap_if_dead, "
        "is_functorch_wrapped_tensor, get_unwrapped, maybe_get_level, is_gradtrackingtensor",
        "To take tensors to the level below, in the rule of grad or jvp, and back.",
        "autograd.Function with setup_context does it for its own inputs; a closure has others.",
        "A closure under torch.func would be differentiated at the wrong level.",
    ),
    PrivatePart(
        "torch._C._functorch: _add_batch_dim, _unwrap_batched, is_batchedtensor",
        "To take tensors to the level below, in the rule of vmap, and back.",
        "torch.library.register_vmap and autograd.Function.vmap know no captured tensors.",
        "No batching rule, no ragged batch, no named axis.",
    ),
    PrivatePart(
        "torch._C._functorch: pop_dynamic_layer_stack, push_dynamic_layer_stack",
        "To ask a lowered level of jvp for the tangents of a captured tensor.",
        "interpreter.lower() gives no access to the level that it lowers.",
        "A jvp of a closure that captures a dual number would lose the tangent.",
    ),
    PrivatePart(
        "torch._functorch.pyfunctorch: temporarily_clear_interpreter_stack",
        "To trace as if no level were active.",
        "None.",
        "Traces would see tensors of the levels around.",
    ),
    PrivatePart(
        "torch._functorch.vmap: restore_vmap",
        "vmap of a function that says itself where the axis of each output is.",
        "torch.vmap wants out_dims before the call, and an input that is mapped.",
        "vmap with named axes could not run a function whose output is not mapped.",
    ),
    PrivatePart(
        "torch._functorch.eager_transforms: enable_inplace_requires_grad",
        "To make a leaf of what the innermost level records.",
        "requires_grad_ raises inside of torch.func.",
        "Programs could not be derived under grad.",
    ),
    PrivatePart(
        "torch._functorch.eager_transforms: JVP_NESTING",
        "A dual level of the user counts as a level of jvp, in the thread that is in it.",
        "forward_ad.dual_level cannot be nested, nor left for a while.",
        "torch.func.jvp inside of a checkpoint inside of a dual level would raise.",
    ),
    PrivatePart(
        "torch._functorch.utils: enable_single_level_autograd_function",
        "To record one node for one level of torch.func.",
        "autograd.Function passes itself on to all levels.",
        "Operators could not have one derivative at each level.",
    ),
    PrivatePart(
        "torch.autograd.function: _SingleLevelFunction",
        "The autograd.Function that is for one level; and the class that has `apply`.",
        "As above.",
        "As above.",
    ),
    PrivatePart(
        "torch.autograd.forward_ad: _set_fwd_grad_enabled",
        "An autograd.Function switches forward mode off; levels below need it.",
        "None: torch has set_grad_enabled for reverse mode only.",
        "Forward over forward would lose tangents.",
    ),
    PrivatePart(
        "torch._C: _is_fwd_grad_enabled",
        "To restore forward mode as it was.",
        "None.",
        "As above.",
    ),
    PrivatePart(
        "torch.autograd.forward_ad: _current_level",
        "Whether a dual level is active.",
        "None: enter_dual_level only raises if so.",
        "A trace would drop the tangents of its inputs.",
    ),
    PrivatePart(
        "torch._subclasses.functional_tensor: FunctionalTensor, FunctorchFunctionalizeAPI",
        "torch.func.functionalize and AOTAutograd wrap tensors; the rule takes the wrappers off.",
        "torch.library registers kernels for functionalize of operators, not of higher-order ones.",
        "torch.func.functionalize of a checkpoint would raise.",
    ),
    PrivatePart(
        "torch: _from_functional_tensor",
        "As above, for the tensor inside.",
        "torch.func.functionalize unwraps the results of whole functions only.",
        "checkpoint_name would be unknown to torch.compile.",
    ),
)

"""Private parts that traces need: fake tensors, modes that record, sizes that vary."""

from .part import PrivatePart

TRACES = (
    PrivatePart(
        "torch._subclasses.fake_tensor: FakeTensor, FakeTensorMode, DataDependentOutputException, "
        "DynamicOutputShapeException",
        "Tensors without values, on which functions are traced.",
        "torch.device('meta') has no device, and other errors.",
        "No trace.",
    ),
    PrivatePart(
        "torch._subclasses.fake_tensor: disable_fake_tensor_cache",
        "The cache of fake results forgets the storage offset of what is not a view.",
        "None for one operator.",
        "Forward mode over a slice under vmap would raise PyTorch's internal assert.",
    ),
    PrivatePart(
        "torch.fx.experimental.proxy_tensor: ProxyTorchDispatchMode, PythonKeyTracer, "
        "get_proxy_slot, set_proxy_slot, track_tensor_tree, thunkify, disable_proxy_modes_tracing, "
        "disable_autocast_cache, make_fx",
        "To record operators on fake tensors, with inputs that are added while they run.",
        "make_fx wants all inputs before the trace, and captured tensors become constants.",
        "No trace of a closure.",
    ),
    PrivatePart(
        "torch.fx.experimental.proxy_tensor._MakefxTracer: _construct_modes_with_fx_tracer",
        "The session that PyTorch's rules for torch.cond and its kin trace the bodies with.",
        "As above.",
        "torch.cond, while_loop and scan in a checkpoint would raise.",
    ),
    PrivatePart(
        "torch.fx.experimental.proxy_tensor: TorchFunctionMetadataMode",
        "The function mode that PyTorch sets aside while it captures the bodies of torch.cond.",
        "torch.overrides.TorchFunctionMode stays on there.",
        "Captured bodies would be traced twice.",
    ),
    PrivatePart(
        "torch.autograd.grad_mode: _force_original_view_tracking",
        "To differentiate writes to slices by slices, in traces.",
        "None. The derivative of as_strided_scatter, which stands there otherwise, is wrong.",
        "Second derivatives of writes to slices would be wrong.",
    ),
    PrivatePart(
        "torch.overrides: _get_current_function_mode_stack, _push_mode, _pop_mode",
        "To set the modes of outer traces aside, wherever they stand between those of a user.",
        "TorchFunctionMode.__exit__ leaves the innermost mode only.",
        "A trace inside of a trace would be recorded by both.",
    ),
    PrivatePart(
        "torch.utils._python_dispatch: TorchDispatchMode, _disable_current_modes, "
        "_get_current_dispatch_mode_stack",
        "To see operators, and to run without the modes of the surroundings.",
        "The documentation of PyTorch itself imports the mode from there.",
        "No profile, no trace beneath a mode of a user.",
    ),
    PrivatePart(
        "torch._C: _get_dispatch_mode",
        "Whether a trace is in progress, and whose.",
        "get_proxy_mode of torch.fx.experimental is three times as slow, and knows no fake mode.",
        "Each call of a checkpoint would be slower.",
    ),
    PrivatePart(
        "torch._C._TorchDispatchModeKey: PROXY, FAKE", "As above.", "As above.", "As above."
    ),
    PrivatePart(
        "torch._C: _len_torch_dispatch_stack",
        "Whether a mode of a user is to see the operators of a graph.",
        "None.",
        "Graphs would hide their operators from FlopCounterMode and its kin.",
    ),
    PrivatePart(
        "torch._C: _get_deterministic_algorithms, _get_flash_sdp_enabled, "
        "_get_mem_efficient_sdp_enabled, _get_math_sdp_enabled, _get_cudnn_sdp_enabled",
        "Settings on which PyTorch's Python code branches: guards at each call; 0.03 us each.",
        "The public functions are written in Python: 0.09 and 0.14 us each.",
        "Each call of a checkpoint would be 0.5 us slower.",
    ),
    PrivatePart(
        "torch._C: _is_any_autocast_enabled",
        "Whether autocast is on for any device; asked at each call.",
        "torch.is_autocast_enabled is for one device.",
        "Each call of a checkpoint would be slower.",
    ),
    PrivatePart(
        "torch._dispatch.python: enable_python_dispatcher",
        "PyTorch's rules in Python, for sizes that are symbols.",
        "None.",
        "Traces for several sizes would raise at many operators.",
    ),
    PrivatePart(
        "torch.ops.aten: _efficientzerotensor, _new_zeros_with_same_feature_meta",
        "To give a zero its memory before a graph is differentiated again.",
        "None names the operator that forward mode records.",
        "PyTorch's internal assert in third derivatives.",
    ),
    PrivatePart(
        "torch.ops.aten: _is_any_true, _local_scalar_dense",
        "The operators by which anomaly mode reads gradients; in a trace they are answered.",
        "set_detect_anomaly(False) is for all threads.",
        "A trace within detect_anomaly would raise.",
    ),
    PrivatePart(
        "torch.fx.experimental.symbolic_shapes: ShapeEnv, DimDynamic, SYMPY_INTERP",
        "Sizes as symbols, and what a trace assumes of them.",
        "torch.export gives whole programs with sizes, not the parts of a trace.",
        "No dynamic shapes, no ragged batches.",
    ),
    PrivatePart(
        "torch.fx.experimental.symbolic_shapes: guard_or_false, statically_known_true, sym_and",
        "To find the size of a slice whose bounds some elements have, and others do not.",
        "None: the rule of PyTorch 2.11 for fake tensors gives up there.",
        "In PyTorch 2.11 slices of a ragged batch would raise.",
        until="2.11",
    ),
    PrivatePart(
        "torch._guards: SLoc",
        "The line at which a guard was made, here none: nobody reads it.",
        "None: to look for the line imports torch.export and networkx.",
        "The first trace with sizes as symbols would take half a second more.",
    ),
    PrivatePart(
        "torch._subclasses.fake_tensor: in_kernel_invocation_manager",
        "To make a fake tensor of metadata that is known.",
        "None: FakeTensor has no public constructor.",
        "Traces with sizes as symbols would take half as long again.",
    ),
    PrivatePart(
        "torch.Tensor: _is_zerotensor",
        "To see tensors without memory, which forward mode makes.",
        "None is public.",
        "As above: the results of no operator could be kept.",
    ),
    PrivatePart(
        "torch.fx.experimental.sym_node: SymNode",
        "The number inside of a size, to print guards of it under another name.",
        "torch.SymInt has no public constructor.",
        "Guards on sizes could not be run.",
    ),
    PrivatePart(
        "torch.utils._sympy.value_ranges: ValueRanges, bound_sympy",
        "The range of a symbol, and a bound of what is computed from it.",
        "ShapeEnv.create_symbol takes a symbol for positive, or for any number.",
        "`if n > 0` in a ragged batch would be true for an empty element, silently.",
    ),
    PrivatePart(
        "torch.utils._sympy.numbers: int_oo",
        "A range of sizes without an end.",
        "sympy.oo is a real number, which a range of integers refuses.",
        "As above.",
    ),
    PrivatePart(
        "torch: _assert_async",
        "To check in a graph what is assumed of the value of a tensor.",
        "torch._check reads the value at once; torch.library has no such operator.",
        "A negative number as a size in a nested ragged batch would count as 0, silently.",
    ),
    PrivatePart(
        "objects: _expr",
        "The expression of a size before it was simplified.",
        "node.expr puts equal sizes in the place of each other.",
        "Guards that two sizes are equal would be lost.",
    ),
    PrivatePart(
        "torch._dynamo.source: ConstantSource",
        "A symbol needs a name for its origin.",
        "ShapeEnv.create_symbol takes no text.",
        "No dynamic shapes.",
    ),
    PrivatePart(
        "torch.utils._sympy.functions: CeilToInt, FloorDiv, Max, Min",
        "To see in the expression of a size whether it grows with its symbols.",
        "sympy has other classes for them, which sizes are not made of.",
        "Budgets would look at each new size anew: slower, and nothing worse.",
    ),
    PrivatePart(
        "torch.utils._sympy.printers: PythonPrinter",
        "To print a size as Python.",
        "str(expr) prints other operators than Python has.",
        "Guards on sizes could not be run.",
    ),
    PrivatePart(
        "torch._C._dynamo.guards: TensorGuards",
        "To compare types, shapes, strides and dispatch keys of tensors; 0.1 us each.",
        "The same in Python takes ten times as long.",
        "Each call of a checkpoint would be slower.",
    ),
)

"""Private parts of Dynamo, AOTAutograd and inductor."""

from .part import PrivatePart

COMPILERS = (
    PrivatePart(
        "torch._C._dynamo.eval_frame: _FrameAction, _FrameExecStrategy, set_code_exec_strategy",
        "To keep Dynamo out of a function.",
        "torch.compiler.disable takes a second to import, and adds 1 us to each call.",
        "import torchremat would take a second more.",
    ),
    PrivatePart(
        "marks: _torchdynamo_disable, _torchdynamo_disable_msg",
        "As above, with the reason that Dynamo prints.",
        "As above.",
        "As above.",
    ),
    PrivatePart(
        "marks: _dynamo_marked_constant",
        "Dynamo asks torchremat whether torch.func differentiates what it traces.",
        "torch.compiler.assume_constant_result sets it, which imports all of Dynamo: a second.",
        "grad of a checkpoint inside of a compiled function would raise.",
    ),
    PrivatePart(
        "marks: _torchdynamo_inline",
        "Dynamo traces this in place of a replacement.",
        "torch._dynamo.substitute_in_graph takes only functions of other modules.",
        "What another thread compiles during a trace would break its graph.",
    ),
    PrivatePart(
        "marks: _boxed_call",
        "A compiled graph takes one list, which it empties.",
        "None: the documentation of custom backends has make_boxed_func of functorch.",
        "Inputs would stay in memory for the whole backward pass.",
    ),
    PrivatePart(
        "torch.compiler: _is_exporting_flag",
        "Whether torch.export is at work, which leaves checkpoints and names out.",
        "torch.compiler.is_exporting, which Dynamo takes for true in PyTorch 2.11, says no more.",
        "In PyTorch 2.11 a compiled model would lose its checkpoints and names.",
    ),
    PrivatePart(
        "torch._guards: TracingContext, CompileContext, tracing",
        "Whether torch.compile is at work on a captured graph, or captures one; to do so again.",
        "torch.compiler.is_compiling does not tell the two from each other.",
        "Checkpoints inside of torch.compile would be traced where AOTAutograd runs them; a budget "
        "could not be divided over the graphs between graph breaks.",
    ),
    PrivatePart(
        "torch._dynamo: exc.TensorifyScalarRestartAnalysis, symbolic_convert.TensorifyState",
        "A graph with a number that became a constant is compiled once more, outside of Dynamo.",
        "None: it is how AOTAutograd tells Dynamo, which alone is to hear of it.",
        "A budget over graph breaks would fail where a float is an argument that becomes constant.",
    ),
    PrivatePart(
        "torch._dynamo.eval_frame: _use_eager_on_nested_compile",
        "In a trace what torch.compile has made runs as it was written.",
        "torch.compiler.set_stance('force_eager') is for all threads.",
        "A compiled function in a trace would raise.",
        since="2.14",
    ),
    PrivatePart(
        "torch.fx._symbolic_trace: is_fx_symbolic_tracing, _is_fx_tracing_flag",
        "The function by which Dynamo asks whether to run what it has compiled.",
        "torch.compiler.set_stance('force_eager') is for all threads.",
        "A compiled function in a trace would raise.",
        until="2.13",
    ),
    PrivatePart(
        "torch._dynamo: config",
        "As above.",
        "As above.",
        "As above.",
        until="2.13",
    ),
    PrivatePart(
        "torch._dynamo.exc: ShortenTraceback",
        "An error in a backend reaches the user as it is.",
        "Dynamo wraps all others in BackendCompilerFailed.",
        "Errors would lose their class.",
    ),
    PrivatePart(
        "torch._dynamo.backends.common: aot_autograd",
        "To partition the joint graph of what Dynamo has captured.",
        "torch.compile has no option for a partitioner outside of inductor.",
        "No budget for torch.compile with another compiler than inductor.",
    ),
    PrivatePart(
        "torch._functorch.partitioners: default_partition, min_cut_rematerialization_partition",
        "PyTorch's own cuts, with which plans are compared and completed.",
        "None.",
        "A plan could be worse than what PyTorch does alone.",
    ),
    PrivatePart(
        "torch._functorch.config: cse, patch",
        "To leave equal nodes as they are, where a plan has cut between them.",
        "None.",
        "Recomputations would be merged with what they recompute.",
    ),
    PrivatePart(
        "torch._functorch.compile_utils: fx_graph_cse",
        "To merge equal nodes exactly as AOTAutograd does.",
        "A pass of our own would merge others than it does.",
        "Plans would be of another graph than the one that is compiled.",
    ),
    PrivatePart(
        "torch._functorch._aot_autograd.descriptors: InputMutationAOTOutput",
        "Which outputs of a joint graph are new values of inputs.",
        "None.",
        "Modules with buffers could not be compiled with a budget.",
    ),
    PrivatePart(
        "torch.utils.checkpoint: _CachingTorchDispatchMode",
        "The policy of a selective checkpoint around checkpoint_name, in torch.compile.",
        "create_selective_checkpoint_contexts does not say what it has made.",
        "save_only_these_names would save nothing there.",
    ),
    PrivatePart(
        "torch._decomp: decomposition_table",
        "How an operator is made of others, for operators without a rule.",
        "torch.export.default_decompositions has fewer.",
        "Ragged batches and the analysis of axes would know fewer operators.",
    ),
    PrivatePart(
        "torch._inductor.compile_fx: compile_fx, compile_fx_inner",
        "To compile a cut graph.",
        "torch.compile captures and cuts by itself.",
        "No budget for inductor.",
    ),
    PrivatePart(
        "torch._inductor.custom_graph_pass: CustomPartitionerFn",
        "The class of inductor's option for a partitioner.",
        "None: the option takes only that.",
        "As above.",
    ),
    PrivatePart(
        "torch._inductor.decomposition: select_decomp_table",
        "The operators in which inductor gets a graph.",
        "None.",
        "Plans would be of another graph than the one that is compiled.",
    ),
    PrivatePart(
        "torch._inductor.fx_passes.joint_graph: joint_graph_passes",
        "As above: patterns that inductor replaces.",
        "None.",
        "As above.",
    ),
    PrivatePart(
        "torch._inductor.graph: GraphLowering",
        "Whether inductor lays convolutions out with the channels last.",
        "None.",
        "The backward pass would save copies beside inputs.",
    ),
    PrivatePart(
        "torch._inductor.virtualized: V",
        "To let a plan say which kernels may be fused, and inductor find its fake mode.",
        "torch.compile has no option for it.",
        "Inductor would fuse what a plan keeps apart.",
    ),
    PrivatePart(
        "torch._inductor.config: get_type, patch",
        "Options of inductor: their types, and random numbers as eager PyTorch draws them.",
        "torch.compile(options=...) checks them with errors of its own, and compiles.",
        "A wrong option would fail in the middle of a compilation.",
    ),
    PrivatePart(
        "torch._inductor: list_options, list_mode_options",
        "Names of options, for messages; options of modes such as max-autotune.",
        "torch.compile knows modes, but compiles by itself.",
        "jit(mode=...) would not work.",
    ),
)

"""Private parts that the engine of autograd, operators and their dispatch need."""

from .part import PrivatePart

ENGINE = (
    PrivatePart(
        "torch._C: _will_engine_execute_node",
        "Whether anybody waits for the gradient of an input, in this backward pass.",
        "ctx.needs_input_grad says what requires a gradient, not what grad(inputs=...) asks for.",
        "A backward pass for some inputs would recompute for all.",
    ),
    PrivatePart(
        "torch._C._autograd: _get_current_graph_task_keep_graph",
        "Whether a backward pass may free what it reads (no retain_graph).",
        "None.",
        "Residuals would stay until the graph is freed: a higher peak.",
    ),
    PrivatePart(
        "torch._C: _current_graph_task_id",
        "Which backward pass runs: what one has recomputed is not for another.",
        "None.",
        "A tape would run again for each tensor that autograd saved.",
    ),
    PrivatePart(
        "torch.autograd.Variable._execution_engine: queue_callback",
        "To free what a backward pass has recomputed and nobody took, when it ends.",
        "torch.autograd.graph has hooks of nodes and tensors, none of a whole pass.",
        "Recomputed values would stay until the graph is freed.",
    ),
    PrivatePart(
        "torch._C._autograd: _get_sequence_nr",
        "Which node of autograd saves a tensor: the budget of a tape needs the moment it is read.",
        "Hooks of saved tensors get the tensor, and nothing of the node.",
        "A budget on a tape could not tell when a saved value is freed.",
    ),
    PrivatePart(
        "objects: _sequence_nr, _input_metadata",
        "The order in which a backward pass runs its nodes, and the bytes of their cotangents.",
        "Node has next_functions and a name, neither an order nor shapes.",
        "A budget on a tape could not tell the peak of the backward pass.",
    ),
    PrivatePart(
        "torch.autograd.graph: _engine_run_backward",
        "A backward pass that keeps function modes on, and to know the engine's own calls.",
        "torch.autograd.grad sets the innermost mode aside.",
        "torch.utils.checkpoint inside of a trace would recompute without the trace.",
    ),
    PrivatePart(
        "torch._C._autograd: _top_saved_tensors_default_hooks, _saved_tensors_hooks_enable, "
        "_saved_tensors_hooks_disable, _saved_tensors_hooks_get_disabled_error_message",
        "To set the hooks around a trace aside, and to allow hooks inside of torch.func.grad.",
        "torch.autograd.graph pops and pushes hooks, but neither lists nor allows them.",
        "Hooks such as save_on_cpu would get fake tensors.",
    ),
    PrivatePart(
        "torch.autograd.Function: _backward_cls",
        "The class of a function's nodes, whose hooks raise where they call themselves for ever.",
        "Tensor.grad_fn has the node of one call: hooks would have to be put on each.",
        "A hook on one output that runs the backward pass of another would fill the memory.",
    ),
    PrivatePart(
        "torch.autograd.Function._backward_cls: _register_hook_dict",
        "To call the hook of an output of a checkpoint only where that output has a gradient.",
        "Tensor.register_hook is for all tensors, and a hook cannot tell by whom it was given.",
        "In a backward pass of another output the hook would be called with None.",
    ),
    PrivatePart(
        "torch.Tensor: _post_accumulate_grad_hooks",
        "Whether somebody waits for the gradient of a parameter before the backward pass ends.",
        "None lists hooks.",
        "A short checkpoint would hand out all gradients at its end, or each at a cost.",
    ),
    PrivatePart(
        "torch.Tensor: _backward_hooks",
        "The dict of a tensor's hooks, in whose place one is put that wraps them.",
        "None lists or replaces hooks.",
        "In a backward pass of another output the hook would be called with None.",
    ),
    PrivatePart(
        "torch._C: _AutoDispatchBelowADInplaceOrView",
        "To run a graph beneath autograd; less than half the price of no_grad.",
        "torch.no_grad still notes views, and is slower.",
        "Each call of a checkpoint would be slower.",
    ),
    PrivatePart(
        "torch._C: _AutoDispatchBelowAutograd",
        "To call the rule of an operator below autograd.",
        "torch.library has no such guard for kernels in Python.",
        "Custom operators would call themselves without end.",
    ),
    PrivatePart(
        "torch._C: _dispatch_tls_is_dispatch_key_excluded",
        "Whether the caller is beneath autograd; 0.3 us.",
        "torch.is_grad_enabled says something else.",
        "Operators of the library would record nodes where nobody reads them.",
    ),
    PrivatePart(
        "torch._C: _ForceDispatchKeyGuard, _dispatch_tls_local_include_set, "
        "_dispatch_tls_local_exclude_set",
        "To set the state of dispatch: in a batching rule, a kernel, and after an error of vmap.",
        "None in Python; C++ has guards.",
        "A kernel could not use torch.func, and an error in nested vmap would break the thread.",
    ),
    PrivatePart(
        "torch._C: _dispatch_tls_is_dispatch_key_included, _dispatch_tls_set_dispatch_key_included",
        "To divert a call of an autograd function, whose `apply` is a function in C.",
        "None: a function in C is not replaced for those who hold it.",
        "A captured tensor that is passed to an autograd function would be missed.",
        since="2.14",
    ),
    PrivatePart(
        "torch._ops: HigherOrderOperator, OpOverload, OpOverloadPacket",
        "remat_p and collectives are higher-order operators; graphs hold overloads.",
        "type(torch.ops.aten.add.Tensor) gives the class without a type for checkers.",
        "A checkpoint would not be one operator in a graph.",
    ),
    PrivatePart(
        "torch.ops.aten.add.Tensor: _schema",
        "Arguments, aliases and writes of an operator.",
        "None: torch.library.infer_schema reads Python functions.",
        "Writes in place could not be found.",
    ),
    PrivatePart(
        "torch.ops.aten.add.Tensor: _op",
        "The operator as a builtin, without the Python around it, where graphs are replayed.",
        "Calling the overload itself costs a Python frame more.",
        "Replayed graphs would be slower.",
    ),
    PrivatePart(
        "torch._C: _dispatch_get_all_op_names, _dispatch_has_kernel_for_dispatch_key",
        "To find the composite operators for which vmap has neither a rule nor a loop.",
        "None: torch.library.get_kernel gives one for any key.",
        "vmap of a checkpoint with column_stack would raise.",
    ),
    PrivatePart(
        "torch.library.Library: _destroy",
        "To take a batching rule back.",
        "A Library unregisters when it is collected, which nothing promises to be at once.",
        "A rule that was deleted would hold for a while.",
    ),
    PrivatePart(
        "torch.ops.aten: _scaled_dot_product_flash_attention_for_cpu, "
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "Flash attention with its logsumexp, which ragged batches merge.",
        "torch.nn.functional.scaled_dot_product_attention gives no logsumexp.",
        "Ragged attention on a CPU would write the whole matrix.",
    ),
    PrivatePart(
        "torch.ops.aten: _flash_attention_forward, _flash_attention_backward",
        "Attention of segments on a GPU, forward and backward.",
        "torch.nn.attention.varlen.varlen_attn has no derivative of its derivative.",
        "Ragged attention on a GPU would write the whole matrix.",
    ),
    PrivatePart(
        "torch.ops.aten: _grouped_mm",
        "PyTorch's rule for fake tensors refuses dtypes which the kernels take.",
        "torch.library.register_fake does not replace a rule that exists.",
        "Mixtures of experts could not be traced in float32.",
    ),
    PrivatePart(
        "torch.ops.aten: _batch_norm_with_update, _native_batch_norm_legit, "
        "_log_softmax_backward_data",
        "Operators whose rules for fake tensors give other strides than their kernels.",
        "torch.library.register_fake does not replace a rule that exists.",
        "A view of a batch norm over a transpose would fail in each call.",
    ),
    PrivatePart(
        "torch.ops: _c10d_functional",
        "Collectives that take the name of their group, so that a graph can hold them.",
        "torch.distributed functions write in place and take a group object.",
        "Collectives of processes could not be in a graph.",
    ),
    PrivatePart(
        "torch.distributed.distributed_c10d: _resolve_process_group, _get_default_store",
        "The group of a name, and the store in which processes meet.",
        "torch.distributed.group.WORLD gives the default group, but no store.",
        "Plans could not be agreed on between processes.",
    ),
    PrivatePart(
        "torch.distributed.ProcessGroup: _get_backend, _device_types",
        "The backend of the default group, whose options have the timeout.",
        "torch.distributed.get_backend gives a name.",
        "Waits would last as long as PyTorch's default says.",
    ),
    PrivatePart("objects: _timeout", "As above.", "As above.", "As above."),
    PrivatePart(
        "objects: _mesh_resources",
        "The device mesh whose block is active.",
        "None: torch.distributed.device_mesh has no function for it.",
        "Shardings would need their mesh each time.",
    ),
)

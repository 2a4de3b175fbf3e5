"""Everything private of PyTorch that torchremat uses, and every patch of PyTorch.

A new PyTorch release is the work of this room alone: `tests/_torch/test_entries.py` names each
entry, and checks that it is there and behaves as the library needs. No other room imports a private
name, and this one imports no other room but `errors`
and `tested_versions`. Begin with the tables: `parts/`
says what each private name is for, and `patches.py` what the library replaces in PyTorch. The other
files have one part of PyTorch each. `versions/` has what happens where one of them is missing.
"""

from .versions.supplied import MISSING_PARTS  # isort: skip  (before those that it imports)
from .aot import (
    MUST_RECOMPUTE, MUST_SAVE, Partitioner, aot_autograd, decompose, decomposition_table,
    ends_in_graph_break, keep_compile_context,
    default_partition, find_written_inputs, is_compiled_by_inductor, is_exporting, MARK_OF_DYNAMO,
    is_in_stock_compiler, mark_as_constant, merge_alike, min_cut_partition, node_in_compiler,
    out_of_compiler, run_outside_dynamo, selective_policy_at_work, selective_policy_of, to_user,
)  # fmt: skip
from .distributed import (
    current_mesh, group_named, process_collectives, store_of_processes, timeout_of_processes,
)  # fmt: skip
from .engine import (
    FREES_COTANGENTS, FunctionHandler, attributes_of, backward_hooks_of, backward_pass_id,
    below_autograd, call_after_backward, cotangents_of, direct_apply, edges_that_run,
    forward_hooks_of, has_saved_tensors_hooks, in_dual_level, is_below_autograd,
    is_function_of_user, keeps_graph_after_backward, next_node_number, node_class_of,
    node_number_of, run_backward, set_saved_tensors_hooks_aside, step_without_hooks,
    wrap_tensor_hooks,
)  # fmt: skip
from .fake_proxy import (
    DATA_DEPENDENT_ERRORS, PLAIN_TORCH_FUNCTIONS, RECURRENT, SWITCHES, ZERO_TENSOR,
    FakeTensor, FakeTensorMode, ProxyTorchDispatchMode, PythonKeyTracer, TorchDispatchMode,
    TorchFunctionMetadataMode,
    answer_nan_checks, answer_operators, autograd_as_at_the_top, enter_proxy_modes,
    erase_questions, find_ragged_dim, function_modes,
    innermost_proxy_mode, is_active, is_any_autocast_enabled, is_fake, is_faking,
    is_traceable_wrapper_subclass, is_transformed_or_watched, isolate, leave_function_mode,
    new_fake_mode, new_tracer, proxy_of, replay_views, track, track_size, untraced,
    without_function_modes,
)  # fmt: skip
from .flash_attention import (
    FLASH_ATTENTION, FLASH_ATTENTION_BACKWARD, attend_ragged, attend_ragged_backward,
    flash_attention_on_cpu, flash_attention_on_cpu_backward,
)  # fmt: skip
from .functorch import (
    LOOP_WARNING, RecordRule, TransformType, VmapLevel, add_batch_dim, apply_to_functional,
    asks_for_value, at_level_below, differentiates, dispatch_restored, find_looped_operator,
    find_unmapped_operator,
    functorch_is_active, has_tangents, innermost_tensor, innermost_transform, is_mapped_at,
    is_of_level_above,
    leaf_at_current_level, map_at_current_level, needs_mapped_value, offset_of,
    push_dual_numbers_forward, push_forward_at_current_level, record_at_current_level,
    requires_grad_at_any_level, restore_vmap, transform_depth, unwrap_batched_tensor,
    unwrap_dead_wrappers, without_batch, without_dead_levels, without_level,
    wrap_at_current_level,
)  # fmt: skip
from .kernels.gpu import Gpu
from .inductor import (
    compile_fx, compile_with_inductor, has_triton, inductor_decompositions, inductor_modes,
    inductor_option_names, inductor_option_type, inductor_partitioner, simplify_for_inductor,
)  # fmt: skip
from .memory import (
    count_hooks, generator_id, has_gradient_hooks, is_view, is_view_of_leaf, parts_of_coo,
    storage_id, storage_uses, StorageReference, swap_memory, tensor_uses, version_of,
    negate_lazily, without_memory,
)  # fmt: skip
from .operators import (
    DispatchKey, HigherOrderOperator, OpOverload, OpOverloadPacket, dispatch_call,
    find_unmapped_composites, get_boxed_call, is_reduction, register_axis_rules,
    register_derivative_rules, register_function, register_simple_rules, schema_arguments,
    schema_of,
)  # fmt: skip
from .kernels.registered import (
    let_modes_see_views_of_zeros,
    replace_batching_rule,
    restore_batching_rule,
)
from .patches import (
    CheckpointHandler, call_around_modules, dual_level_as_functorch_level,
    handle_checkpoints, handle_function_calls, hide_fakes, let_functions_know_axes,

    lift_before_wrapping, note_attribute_reads,
    set_module_trackers_aside, symbolic_lengths, stand_for_gpu,
)  # fmt: skip
from .pytrees import (
    GetAttrKey, SequenceKey, TreeSpec, children_of, keystr, register_pytree_node, tree_flatten,
    tree_flatten_with_path, tree_map, tree_unflatten,
)  # fmt: skip
from .replacements import GLOBAL_MODULE_HOOKS, is_own_hook
from .symbols.shape_env import (
    NAMES_IN_SIZES, AskingShapeEnv, ShapeEnv, TensorGuards, asks_for_zero_or_one, assert_later,
    are_known_equal, assume_sizes, find_assumed_sizes, greatest_value, grows_with_symbols,
    guards_of, hint_of, size_name, is_condition, is_equation, linear_form, names_in_size,
    negate_inequation, new_shape_env, new_symbol, num_guards, print_question, print_size,
    question_of, settle_size, shape_env_of, split_condition, symbols_of_question, tensor_guard,
)  # fmt: skip
from .versions.missing import guard_functions
from .versions.tested import NEWEST, OLDEST, is_newer, warn_once_of_newer

warn_once_of_newer()
if MISSING_PARTS or is_newer():
    guard_functions(globals())

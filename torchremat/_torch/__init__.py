"""Everything private of PyTorch that torchremat uses, and every patch of PyTorch.

A new PyTorch release is the work of this room alone: `tests/_torch/test_entries.py` names each
entry, and checks that it is there and behaves as the library needs. No other room imports a private
name, and this one imports no other room of the package. Begin with `patches.py`, whose table lists
each attribute of PyTorch that the library replaces; the other files have one part of PyTorch each.
"""

from .aot import MUST_RECOMPUTE as MUST_RECOMPUTE
from .aot import MUST_SAVE as MUST_SAVE
from .aot import Partitioner as Partitioner
from .aot import aot_autograd as aot_autograd
from .aot import decompose as decompose
from .aot import decomposition_table as decomposition_table
from .aot import default_partition as default_partition
from .aot import is_compiled_by_inductor as is_compiled_by_inductor
from .aot import is_in_stock_compiler as is_in_stock_compiler
from .aot import merge_alike as merge_alike
from .aot import min_cut_partition as min_cut_partition
from .aot import node_in_compiler as node_in_compiler
from .aot import out_of_compiler as out_of_compiler
from .aot import selective_policy_at_work as selective_policy_at_work
from .aot import to_user as to_user
from .aot import written_inputs as written_inputs
from .distributed import current_mesh as current_mesh
from .distributed import group_named as group_named
from .distributed import process_collectives as process_collectives
from .distributed import store_of_processes as store_of_processes
from .distributed import timeout_of_processes as timeout_of_processes
from .engine import attributes_of as attributes_of
from .engine import backward_hooks_of as backward_hooks_of
from .engine import below_autograd as below_autograd
from .engine import direct_apply as direct_apply
from .engine import edges_that_run as edges_that_run
from .engine import forward_hooks_of as forward_hooks_of
from .engine import has_saved_tensors_hooks as has_saved_tensors_hooks
from .engine import in_dual_level as in_dual_level
from .engine import is_below_autograd as is_below_autograd
from .engine import is_function_of_user as is_function_of_user
from .engine import keeps_graph_after_backward as keeps_graph_after_backward
from .engine import run_backward as run_backward
from .engine import set_saved_tensors_hooks_aside as set_saved_tensors_hooks_aside
from .fake_proxy import DATA_DEPENDENT_ERRORS as DATA_DEPENDENT_ERRORS
from .fake_proxy import PLAIN_TORCH_FUNCTIONS as PLAIN_TORCH_FUNCTIONS
from .fake_proxy import RECURRENT as RECURRENT
from .fake_proxy import SWITCHES as SWITCHES
from .fake_proxy import FakeTensor as FakeTensor
from .fake_proxy import FakeTensorMode as FakeTensorMode
from .fake_proxy import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from .fake_proxy import PythonKeyTracer as PythonKeyTracer
from .fake_proxy import TorchDispatchMode as TorchDispatchMode
from .fake_proxy import TorchFunctionMetadataMode as TorchFunctionMetadataMode
from .fake_proxy import autograd_as_at_the_top as autograd_as_at_the_top
from .fake_proxy import enter_proxy_modes as enter_proxy_modes
from .fake_proxy import innermost_proxy_mode as innermost_proxy_mode
from .fake_proxy import is_active as is_active
from .fake_proxy import is_any_autocast_enabled as is_any_autocast_enabled
from .fake_proxy import is_fake as is_fake
from .fake_proxy import is_faking as is_faking
from .fake_proxy import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from .fake_proxy import is_transformed_or_watched as is_transformed_or_watched
from .fake_proxy import isolate as isolate
from .fake_proxy import new_fake_mode as new_fake_mode
from .fake_proxy import proxy_of as proxy_of
from .fake_proxy import ragged_dim_of as ragged_dim_of
from .fake_proxy import track as track
from .fake_proxy import track_size as track_size
from .fake_proxy import untraced as untraced
from .fake_proxy import without_function_modes as without_function_modes
from .flash_attention import FLASH_ATTENTION as FLASH_ATTENTION
from .flash_attention import FLASH_ATTENTION_BACKWARD as FLASH_ATTENTION_BACKWARD
from .flash_attention import flash_attention_on_cpu as flash_attention_on_cpu
from .flash_attention import flash_attention_on_cpu_backward as flash_attention_on_cpu_backward
from .flash_attention import ragged_flash_attention as ragged_flash_attention
from .flash_attention import ragged_flash_attention_backward as ragged_flash_attention_backward
from .functorch import LOOP_WARNING as LOOP_WARNING
from .functorch import RecordRule as RecordRule
from .functorch import TransformType as TransformType
from .functorch import VmapLevel as VmapLevel
from .functorch import add_batch_dim as add_batch_dim
from .functorch import apply_to_functional as apply_to_functional
from .functorch import asks_for_value as asks_for_value
from .functorch import at_level_below as at_level_below
from .functorch import differentiates as differentiates
from .functorch import dispatch_restored as dispatch_restored
from .functorch import functorch_is_active as functorch_is_active
from .functorch import has_tangents as has_tangents
from .functorch import innermost_tensor as innermost_tensor
from .functorch import innermost_transform as innermost_transform
from .functorch import is_mapped_at as is_mapped_at
from .functorch import leaf_at_current_level as leaf_at_current_level
from .functorch import looped_operator as looped_operator
from .functorch import map_at_current_level as map_at_current_level
from .functorch import needs_mapped_value as needs_mapped_value
from .functorch import offset_of as offset_of
from .functorch import push_dual_numbers_forward as push_dual_numbers_forward
from .functorch import push_forward_at_current_level as push_forward_at_current_level
from .functorch import record_at_current_level as record_at_current_level
from .functorch import requires_grad_at_any_level as requires_grad_at_any_level
from .functorch import restore_vmap as restore_vmap
from .functorch import transform_depth as transform_depth
from .functorch import unwrap_batched_tensor as unwrap_batched_tensor
from .functorch import unwrap_dead_wrappers as unwrap_dead_wrappers
from .functorch import with_batch_at as with_batch_at
from .functorch import without_dead_levels as without_dead_levels
from .functorch import without_level as without_level
from .inductor import compile_fx as compile_fx
from .inductor import compile_with_inductor as compile_with_inductor
from .inductor import has_triton as has_triton
from .inductor import inductor_decompositions as inductor_decompositions
from .inductor import inductor_modes as inductor_modes
from .inductor import inductor_option_names as inductor_option_names
from .inductor import inductor_option_type as inductor_option_type
from .inductor import inductor_partitioner as inductor_partitioner
from .inductor import simplify_for_inductor as simplify_for_inductor
from .memory import is_view as is_view
from .memory import parts_of_coo as parts_of_coo
from .memory import storage_id as storage_id
from .memory import storage_uses as storage_uses
from .memory import swap_memory as swap_memory
from .memory import tensor_uses as tensor_uses
from .memory import version_of as version_of
from .memory import without_memory as without_memory
from .operators import DispatchKey as DispatchKey
from .operators import HigherOrderOperator as HigherOrderOperator
from .operators import OpOverload as OpOverload
from .operators import OpOverloadPacket as OpOverloadPacket
from .operators import boxed_call as boxed_call
from .operators import dispatch_call as dispatch_call
from .operators import is_reduction as is_reduction
from .operators import register_axis_rules as register_axis_rules
from .operators import register_derivative_rules as register_derivative_rules
from .operators import register_function as register_function
from .operators import register_simple_rules as register_simple_rules
from .operators import schema_arguments as schema_arguments
from .operators import schema_of as schema_of
from .patches import FunctionHandler as FunctionHandler
from .patches import allow_tf32 as allow_tf32
from .patches import call_around_modules as call_around_modules
from .patches import check_comparisons_of as check_comparisons_of
from .patches import dual_level_as_functorch_level as dual_level_as_functorch_level
from .patches import handle_function_calls as handle_function_calls
from .patches import let_functions_know_axes as let_functions_know_axes
from .patches import let_modes_see_views_of_zeros as let_modes_see_views_of_zeros
from .patches import lift_before_wrapping as lift_before_wrapping
from .patches import replace_batching_rule as replace_batching_rule
from .patches import restore_batching_rule as restore_batching_rule
from .patches import set_module_trackers_aside as set_module_trackers_aside
from .pytrees import GetAttrKey as GetAttrKey
from .pytrees import TreeSpec as TreeSpec
from .pytrees import children_of as children_of
from .pytrees import keystr as keystr
from .pytrees import register_pytree_node as register_pytree_node
from .pytrees import tree_flatten as tree_flatten
from .pytrees import tree_flatten_with_path as tree_flatten_with_path
from .pytrees import tree_map as tree_map
from .pytrees import tree_unflatten as tree_unflatten
from .replacements import GLOBAL_MODULE_HOOKS as GLOBAL_MODULE_HOOKS
from .replacements import is_own_hook as is_own_hook
from .shape_env import NAMES_IN_SIZES as NAMES_IN_SIZES
from .shape_env import ShapeEnv as ShapeEnv
from .shape_env import TensorGuards as TensorGuards
from .shape_env import depends_on_symbols as depends_on_symbols
from .shape_env import guards_of as guards_of
from .shape_env import hint_of as hint_of
from .shape_env import names_in_size as names_in_size
from .shape_env import new_shape_env as new_shape_env
from .shape_env import new_symbol as new_symbol
from .shape_env import num_guards as num_guards
from .shape_env import printed_size as printed_size
from .shape_env import settled_size as settled_size
from .shape_env import shape_env_of as shape_env_of
from .shape_env import tensor_guard as tensor_guard
from .aot import (
    MUST_RECOMPUTE, MUST_SAVE, Partitioner, aot_autograd, decompose, decomposition_table,
    default_partition, is_compiled_by_inductor, is_in_stock_compiler, merge_alike,
    min_cut_partition, node_in_compiler, out_of_compiler, selective_policy_at_work, to_user,
    written_inputs,
)  # fmt: skip
from .distributed import (
    current_mesh, group_named, process_collectives, store_of_processes, timeout_of_processes,
)  # fmt: skip
from .engine import (
    attributes_of, backward_hooks_of, below_autograd, direct_apply, edges_that_run,
    forward_hooks_of, has_saved_tensors_hooks, in_dual_level, is_below_autograd,
    is_function_of_user, keeps_graph_after_backward, run_backward, set_saved_tensors_hooks_aside,
)  # fmt: skip
from .fake_proxy import (
    DATA_DEPENDENT_ERRORS, PLAIN_TORCH_FUNCTIONS, RECURRENT, SWITCHES, FakeTensor, FakeTensorMode,
    ProxyTorchDispatchMode, PythonKeyTracer, TorchDispatchMode, TorchFunctionMetadataMode,
    autograd_as_at_the_top, enter_proxy_modes, innermost_proxy_mode, is_active,
    is_any_autocast_enabled, is_fake, is_faking, is_traceable_wrapper_subclass,
    is_transformed_or_watched, isolate, new_fake_mode, proxy_of, ragged_dim_of, track, track_size,
    untraced, without_function_modes,
)  # fmt: skip
from .flash_attention import (
    FLASH_ATTENTION, FLASH_ATTENTION_BACKWARD, flash_attention_on_cpu,
    flash_attention_on_cpu_backward, ragged_flash_attention, ragged_flash_attention_backward,
)  # fmt: skip
from .functorch import (
    LOOP_WARNING, RecordRule, TransformType, VmapLevel, add_batch_dim, apply_to_functional,
    asks_for_value, at_level_below, differentiates, dispatch_restored, functorch_is_active,
    has_tangents, innermost_tensor, innermost_transform, is_mapped_at, leaf_at_current_level,
    looped_operator, map_at_current_level, needs_mapped_value, offset_of, push_dual_numbers_forward,
    push_forward_at_current_level, record_at_current_level, requires_grad_at_any_level,
    restore_vmap, transform_depth, unwrap_batched_tensor, unwrap_dead_wrappers, with_batch_at,
    without_dead_levels, without_level,
)  # fmt: skip
from .inductor import (
    compile_fx, compile_with_inductor, has_triton, inductor_decompositions, inductor_modes,
    inductor_option_names, inductor_option_type, inductor_partitioner, simplify_for_inductor,
)  # fmt: skip
from .memory import (
    is_view, parts_of_coo, storage_id, storage_uses, swap_memory, tensor_uses, version_of,
    without_memory,
)  # fmt: skip
from .operators import (
    DispatchKey, HigherOrderOperator, OpOverload, OpOverloadPacket, boxed_call, dispatch_call,
    is_reduction, register_axis_rules, register_derivative_rules, register_function,
    register_simple_rules, schema_arguments, schema_of,
)  # fmt: skip
from .patches import (
    FunctionHandler, call_around_modules, check_comparisons_of, dual_level_as_functorch_level,
    handle_function_calls, let_functions_know_axes, let_modes_see_views_of_zeros,
    lift_before_wrapping, replace_batching_rule, restore_batching_rule, set_module_trackers_aside,
)  # fmt: skip
from .pytrees import (
    GetAttrKey, TreeSpec, children_of, keystr, register_pytree_node, tree_flatten,
    tree_flatten_with_path, tree_map, tree_unflatten,
)  # fmt: skip
from .replacements import GLOBAL_MODULE_HOOKS, is_own_hook
from .shape_env import (
    NAMES_IN_SIZES, ShapeEnv, TensorGuards, depends_on_symbols, guards_of, hint_of, names_in_size,
    new_shape_env, new_symbol, num_guards, printed_size, settled_size, shape_env_of, tensor_guard,
)  # fmt: skip

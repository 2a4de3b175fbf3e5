"""Dynamo and AOTAutograd: partitioners, decompositions, what is being compiled.

Modules of compilers are imported where they are needed: they take a second.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .fake_proxy import innermost_proxy_mode

_F = TypeVar("_F", bound=Callable[..., Any])
_Made = TypeVar("_Made")

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
    return config is not None and bool(config())


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


def mark_as_constant(function: Callable[[], bool]) -> None:
    """Let Dynamo call `function` when it meets it, and take the answer for a constant.

    As `torch.compiler.assume_constant_result`, which imports all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_in_stock_compiler() -> bool:
    """Whether `torch.compile` is at work on a graph that Dynamo has captured."""
    return torch._guards.TracingContext.try_get() is not None


MARK_OF_DYNAMO = "_dynamo_static_input_type"
"""The attribute that Dynamo sets on a parameter which it meets, in the body of a `scan` say."""


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, which PyTorch 2.11 compiles as true whatever it traces for."""
    return torch.compiler._is_exporting_flag


def selective_policy_at_work() -> Any:
    found = map(selective_policy_of, reversed(_get_current_dispatch_mode_stack()))
    return next((policy for policy in found if policy is not None), None)


def selective_policy_of(context: Any) -> Any:
    """The policy of a context that `create_selective_checkpoint_contexts` made; else `None`."""
    is_selective = isinstance(context, torch.utils.checkpoint._CachingTorchDispatchMode)
    return context.policy_fn if is_selective else None


def node_in_compiler(tensor: torch.Tensor) -> torch.fx.Node | None:
    mode = innermost_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def find_written_inputs(module: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """Find the outputs of AOTAutograd's joint graph that are new values of inputs, by position."""
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
    """Cut by PyTorch's partitioner that saves what autograd saves, but for nodes with a mark."""
    from torch._functorch.partitioners import default_partition

    return default_partition(module, inputs, **options)


def min_cut_partition(
    module: torch.fx.GraphModule, inputs: Sequence[object], *, merges: bool = True, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut by PyTorch's partitioner that saves the least, if what can be fused is recomputed.

    Unless `merges`, what is computed twice stays so.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(cse=config.cse and merges):
        return min_cut_rematerialization_partition(module, inputs, compiler="inductor", **options)


def decomposition_table() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    return decomposition_table


def to_user(error: Exception, frame: FrameType) -> Exception:
    """`error` so that Dynamo hands it to the user as it is, its traceback from `frame` on."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    if not issubclass(kind, ShortenTraceback):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        error.__class__ = type(kind.__name__, (kind, ShortenTraceback), names)
        error.first_useful_frame = frame  # type: ignore[attr-defined]
    return error


def keep_compile_context(
    inputs: Sequence[Any],
) -> tuple[list[Any], Callable[[], AbstractContextManager[None]]]:
    """Fake tensors for the `inputs` of a backend, and a function that enters its context again."""
    context = torch._guards.TracingContext.get()
    mode = context.fake_mode
    assert mode is not None, "Dynamo captures with fake tensors"

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        symbols = context.tensor_to_context.get(value)
        if symbols is None:
            return mode.from_tensor(value, static_shapes=True)
        source = symbols.tensor_source
        return mode.from_tensor(value, symbolic_context=symbols, source=source)

    @contextmanager
    def enter() -> Iterator[None]:
        before, context.fake_mode = context.fake_mode, mode
        try:
            with torch._guards.tracing(context):
                yield
        finally:
            context.fake_mode = before

    with warnings.catch_warnings():  # it asks each tensor for its gradient, also those without
        warnings.simplefilter("ignore", UserWarning)
        return [fake(value) for value in inputs], enter


def run_outside_dynamo(make: Callable[[], _Made]) -> _Made:
    """Run `make`, which compiles a graph that Dynamo captured some time ago.

    AOTAutograd asks Dynamo to capture once more where a number became a constant, unless Dynamo
    knows of it. It did know when it captured the graph, and has forgotten since.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    try:
        return make()
    except TensorifyScalarRestartAnalysis:
        return make()  # now it is known
    finally:
        TensorifyState.clear()


def ends_in_graph_break(module: torch.fx.GraphModule) -> bool:
    """Whether Dynamo ended this graph since it could not go on, and will capture another."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


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

    def box(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        run = compiler(graph)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=box, partition_fn=partition)(module, inputs)


def decompose(
    module: torch.fx.GraphModule, inputs: Sequence[Any], table: Mapping[Any, Any]
) -> torch.fx.GraphModule:
    """Trace `module` again on fake `inputs`, with operators broken up as `table` says."""
    fake_mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
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

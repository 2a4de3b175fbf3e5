"""Inductor: its settings, and graphs compiled by it.

Modules of compilers are imported where they are needed: they take a second.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from importlib.util import find_spec
from types import UnionType
from typing import Any, get_origin

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .aot import Partitioner, decompose, merge_alike


def simplify_for_inductor(
    module: torch.fx.GraphModule, merge: Callable[[torch.fx.Graph], torch.fx.Graph] | None = None
) -> None:
    """Simplify a joint graph in inductor's operators, as inductor and the minimum cut do.

    Equal nodes are merged, by `merge` if it is given, and patterns are replaced.
    """
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    joint_graph_passes(module)
    module.graph = (merge or merge_alike)(module.graph)
    module.recompile()


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


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_option_names() -> list[str]:
    import torch._inductor

    return torch._inductor.list_options()


def inductor_option_type(name: str) -> type | UnionType | None:
    from torch._inductor import config

    kind = config.get_type(name)  # type: ignore[attr-defined]
    return kind if isinstance(kind, type | UnionType) and get_origin(kind) is None else None


def inductor_modes() -> dict[str, dict[str, Any]]:
    import torch._inductor

    return torch._inductor.list_mode_options()


_MayFuse = Callable[[list[AbstractSet[torch.fx.Node]], list[AbstractSet[torch.fx.Node]]], bool]


def has_triton() -> bool:
    return find_spec("triton") is not None


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

    `keeps_as_cut`: the forward graph saves what the partition function says, also where
    convolutions read it, and not a copy in the layout that inductor gives them.

    `may_fuse` decides whether two kernels may become one: for each it takes the nodes of the graph
    that every loop in it computes.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_graph(graph_module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        if keeps_as_cut:
            _give_inputs_as_they_lie(graph_module.graph)
        if keeps_as_cut and kwargs.get("is_backward"):
            _lay_out_convolutions(graph_module)
        with ExitStack() as stack:
            if may_fuse is not None:
                choices = _limit_fusion(type(V.choices), may_fuse)
                stack.enter_context(V.set_choices_handler(choices))
            return compile_fx_inner(graph_module, *args, **kwargs)

    return compile_fx(  # type: ignore[return-value]
        module,
        inputs,
        compile_graph if keeps_as_cut or may_fuse is not None else compile_fx_inner,
        config_patches=dict(config),
        decompositions=decompositions,
    )


def _give_inputs_as_they_lie(graph: torch.fx.Graph) -> None:
    """Let inductor give those inputs of `graph` that are results too as they are.

    Of each that a convolution reads, its weights among them, it else gives a copy with the channels
    last. The backward pass then has that copy beside the input.
    """
    output = graph.output_node()
    results = enumerate(output.args[0])  # type: ignore[arg-type]
    inputs = {i for i, r in results if isinstance(r, torch.fx.Node) and r.op == "placeholder"}
    visible = output.meta.get("user_visible_output_idxs", ())
    output.meta["user_visible_output_idxs"] = sorted(inputs.union(visible))


def _lay_out_convolutions(module: torch.fx.GraphModule) -> None:
    """Let convolutions of a backward graph be traced in the layout that inductor gives them.

    Inductor lays out what convolutions read and write with the channels last. A value computed from
    that, which the gradient of a convolution reads, it recomputes in the traced layout. That is
    the layout of the weights, of which inductor makes copies in any case.
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


def _limit_fusion(base: Any, may_fuse: _MayFuse) -> Any:
    """Make the decisions of `base` for inductor, but for kernels that may not be fused."""

    class Choices(base):  # type: ignore[misc]
        @staticmethod
        def can_fuse(scheduler: Any, one: Any, other: Any, score: int) -> bool:
            return may_fuse(_list_nodes(one), _list_nodes(other)) and base.can_fuse(
                scheduler, one, other, score
            )

    return Choices()


def _list_nodes(kernel: Any) -> list[AbstractSet[torch.fx.Node]]:
    loops = (loop.node for loop in kernel.get_nodes())
    return [loop.get_origins() for loop in loops if loop is not None]


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

"""From graphs to compiled functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.replay_rules import draws_in_forward
from torchremat.autodiff.rewrites.loss_gradient_op import loss_gradient, write_plain
from torchremat.batching.collectives.collective_ops import as_c10d_ops
from torchremat.compile.device_support import check_devices, lacks_triton, warn_of_triton
from torchremat.compile.inlining import inline_bodies
from torchremat.compile.tile_calls import name_tiles
from torchremat.errors import OptionError, nearest_names
from torchremat.graph.codegen import Runner, compile_graph
from torchremat.graph.nodes import results_of
from torchremat.policies.checkpoint_name import name_p
from torchremat.remat.program.compilers import register_compiler

BACKENDS = ("inductor", "aot_eager", "eager")


def check_backend(backend: object, what: str = "backend") -> None:
    """Raise `OptionError` if `backend` is none."""
    if backend not in BACKENDS:
        near = nearest_names(str(backend), BACKENDS)
        raise OptionError(f"{what}={backend!r} is not a backend; {near}")


def lower(module: fx.GraphModule, backend: str) -> Runner:
    """A function that runs the graph of `module`, compiled by `backend`.

    Args:
        module: a graph of ATen operators with a fake tensor for each input; it is not changed.
        backend: `"inductor"`; `"eager"`, operator by operator, each checkpoint inside by itself; or
            `"aot_eager"`, operator by operator as inductor sees them, with no checkpoints left.

    Returns:
        A function of one list of inputs, which it empties. It is compiled when it is first called,
        or when `source_of` asks for its code.
    """
    check_backend(backend)
    if backend == "eager":
        return compile_graph(module)
    flat = inline_bodies(module)
    if backend == "aot_eager":
        return compile_graph(flat)
    if lacks_triton(flat):
        warn_of_triton("inductor", "the backend 'eager'")
        return compile_graph(flat)
    return _ByInductor(flat)


def lower_tile(body: fx.GraphModule) -> Runner:
    """A function that runs what is in a tile, compiled by inductor."""
    return lower(body, "inductor")


@dataclass(frozen=True)
class Backend:
    """The way in which `jit` and `wrap` run graphs, by its name, such as `"inductor"`."""

    name: str

    def __post_init__(self) -> None:
        check_backend(self.name)

    @property
    def takes_symbols(self) -> bool:
        """Whether one graph serves many sizes. Inductor compiles a graph for each size."""
        return self.name != "inductor"

    @property
    def fuses(self) -> bool:
        return self.name == "inductor"

    def __call__(self, module: fx.GraphModule) -> Runner:
        return lower(module, self.name)


for _name in ("inductor", "aot_eager"):
    register_compiler(_name, Backend(_name))


class _ByInductor:
    """A graph that inductor compiles when it is needed."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        placeholders = module.graph.find_nodes(op="placeholder")
        self._used = [i for i, node in enumerate(placeholders) if node.users]
        self._fakes = [placeholders[i].meta["val"] for i in self._used]
        self._strides = self._find_strides()
        self._results = tuple(results_of(module))
        self._run: Callable[[list[Any]], Sequence[Any]] | None = None
        self._source = ""

    def _find_strides(self) -> list[tuple[int, tuple[int, ...]]]:
        """Positions of tensors with the strides of the code: cotangents come with their own."""
        fakes = enumerate(self._fakes)
        return [(i, tuple(fake.stride())) for i, fake in fakes if isinstance(fake, Tensor)]

    @property
    def source(self) -> str:
        self._compile()
        return self._source

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        if _torch.is_transformed_or_watched() or any(map(_torch.is_fake, inputs)):
            return self._operator_by_operator(inputs)
        run = self._run or self._compile()
        given = [inputs[i] for i in self._used]
        inputs.clear()
        for at, stride in self._strides:
            if given[at].stride() != stride:
                given[at] = _lay_out(given[at], stride)
        found = iter(run(given))
        return tuple(next(found) if isinstance(r, fx.Node) else r for r in self._results)

    @cached_property
    def _operator_by_operator(self) -> Runner:
        """The graph for `torch.func`, fake tensors, and modes that want to see each operator."""
        return compile_graph(self.module)

    def _compile(self) -> Callable[[list[Any]], Sequence[Any]]:
        if self._run is None:
            check_devices(self.module)
            graph = fx.Graph()
            env: dict[fx.Node, fx.Node] = {}
            named = name_tiles(self.module, lower_tile)
            results = [r for r in results_of(named) if isinstance(r, fx.Node)]
            # a draw that nobody reads moves the generator on: a result, or inductor drops it
            draws = [n for n in named.graph.nodes if not n.users and draws_in_forward(n)]
            for node in named.graph.nodes:
                if node.op == "placeholder" and not node.users:
                    continue
                if node.target is name_p:
                    env[node] = env[node.args[0]]
                elif node.target is loss_gradient:  # inductor fuses what it is made of
                    args = fx.node.map_arg(node.args, env.__getitem__)
                    env[node] = write_plain(graph, args, node.meta["val"].shape)
                elif node.op == "output":
                    graph.output(tuple(env[r] for r in (*results, *draws)))
                else:
                    env[node] = graph.node_copy(node, env.__getitem__)
            module = fx.GraphModule(named, graph)
            with as_c10d_ops():
                self._run, self._source = _torch.compile_with_inductor(module, self._fakes)
        return self._run


def _lay_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)

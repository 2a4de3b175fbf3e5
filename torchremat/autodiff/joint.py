"""The joint graph: a function and its reverse-mode derivative in one graph.

    def f(x, w):            inputs      x, w
        y = x @ w           forward     y = mm(x, w)            z = sin(y)
        return y.sin()      cotangent   ct
                            backward    dy = ct * cos(y)        dx, dw = mm(dy, w.T), mm(x.T, dy)

It is what AOTAutograd traces. The backward operators are autograd's own, on fake tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.bodies import Body, gradients
from torchremat.autodiff.gradient_parts import Part, PartRecorder, choose_parts
from torchremat.errors import EffectError
from torchremat.graph.nodes import ancestors, is_forward
from torchremat.graph.notes import notes_of
from torchremat.tracing.dynamic_inputs import shapes_of
from torchremat.tracing.function_op import FunctionCalls, drop_inside
from torchremat.tracing.functional.functionalize import functionalize
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.no_grad_op import refuse_no_grad_writes
from torchremat.tracing.tracing import Tracing


@dataclass(frozen=True, eq=False)
class Joint:
    """A graph with the parts that matter named; entries that are no nodes are literals.

    `cotangents[i]` and `gradients[i]` are `None` for an output that has no derivative and an input
    that gets none. `mutations` pairs the position of an input that the function writes to with its
    new value. `opened`: checkpoints inside were opened, as no other trace of the function has them.
    `by_compiler`: AOTAutograd has traced it. `runs_own_backward`: a user wrote part of the backward
    pass, as a `torch.autograd.Function`. `untiled`: the same without tiles, if this one has some.
    `usual`: the outputs that have a cotangent in a training step.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    mutations: tuple[tuple[int, fx.Node], ...]
    cotangents: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]
    opened: bool = False
    by_compiler: bool = False
    parts: tuple[Part, ...] = ()
    runs_own_backward: bool = False
    untiled: "Joint | None" = None
    usual: tuple[int, ...] = ()

    @property
    def returned_gradients(self) -> list[fx.Node]:
        """The results of a backward pass: gradients, or the parts of those that have parts."""
        split = {i for i, _ in self.parts}
        whole = [g for i, g in enumerate(self.gradients) if g is not None and i not in split]
        return [*whole, *(value for _, value in self.parts)]

    @property
    def forward_nodes(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if is_forward(node)]

    def copy(self) -> tuple["Joint", dict[fx.Node, fx.Node]]:
        """A joint graph of copies, and the copy of each node."""
        graph = fx.Graph()
        nodes: dict[fx.Node, fx.Node] = {}
        for node in self.module.graph.nodes:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
        copied = replace(self, module=fx.GraphModule(self.module, graph))
        return copied.translate(nodes), nodes

    def translate(self, nodes: Mapping[fx.Node, fx.Node]) -> "Joint":
        """The joint graph with other nodes in the places of those that `nodes` has."""

        def translate_all(entries: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(nodes.get(e, e) if isinstance(e, fx.Node) else e for e in entries)

        return replace(
            self,
            inputs=translate_all(self.inputs),
            outputs=translate_all(self.outputs),
            mutations=tuple((i, nodes.get(value, value)) for i, value in self.mutations),
            cotangents=translate_all(self.cotangents),
            gradients=translate_all(self.gradients),
            parts=tuple((i, nodes.get(value, value)) for i, value in self.parts),
        )

    def find_live_forward_nodes(self) -> list[fx.Node]:
        written = [value for _, value in self.mutations]
        roots = [*self.outputs, *written, *self.gradients]
        needed = ancestors(roots)
        return [node for node in self.forward_nodes if node in needed]


@dataclass(frozen=True)
class TraceOptions:
    """How to trace: which outputs have a cotangent (`None`: all that can), and grad mode.

    `only_usual`: those that `usual_outputs` says.

    With `create_graph` the derivative is by the formulas of one that is differentiated again:
    PyTorch has two for some operators. With `whole_calls`, a checkpoint or a user's
    `autograd.Function` is one operator, whose derivative is its own. With `opens_calls` a
    checkpoint is what its function does. `on_checkpoint` handles those of `torch.utils.checkpoint`.
    """

    with_gradients: bool
    wanted_outputs: tuple[int, ...] | None = None
    only_usual: bool = False
    grad_enabled: bool = True
    whole_calls: bool = False
    create_graph: bool = False
    opens_calls: bool = False
    on_checkpoint: _torch.CheckpointHandler | None = None


def trace_joint(
    body: Body,
    specs: Sequence[InputSpec],
    names: Sequence[str],
    paths: ModulePaths,
    options: TraceOptions,
    *,
    warns: bool = False,
) -> tuple[Joint, Tracing]:
    """Trace `body` and, with gradients, its derivative by the inputs that require one.

    Inputs that `body` closes over come after those of `specs`. `warns` of what a trace leaves out.
    """
    tracing = _begin(paths, specs, options, warns)
    with tracing.recording():
        leaves = [tracing.input(spec, name) for spec, name in zip(specs, names, strict=True)]
        recorder = PartRecorder(is_on=options.with_gradients and not options.create_graph)
        inputs, outputs = _run_body(body, tracing, leaves, specs, options.grad_enabled, recorder)
        leaves += tracing.captured_inputs
        tracing.phase = "backward"
        usual = usual_outputs(outputs, body.num_escaped) if options.with_gradients else ()
        cotangents = _add_cotangents(tracing, outputs, options, usual)
        grads = _differentiate(leaves, outputs, cotangents, options.create_graph, recorder)
        module = tracing.finish([*outputs, *grads, *recorder.values])
    input_nodes = [tracing.placeholder_of(t) for t in leaves]
    cotangent_nodes = [None if t is None else tracing.placeholder_of(t) for t in cotangents]
    if options.whole_calls:
        drop_inside(module.graph)
        refuse_no_grad_writes(module.graph, input_nodes[: len(specs)])
    functional = functionalize(module, input_nodes)
    if options.with_gradients or options.whole_calls:
        _refuse_differentiable_writes(functional.mutations, inputs)
    results, end = tuple(functional.outputs), len(outputs) + len(grads)
    joint = Joint(
        functional.module,
        tuple(functional.node(n) for n in input_nodes),
        results[: len(outputs)],
        functional.mutations,
        tuple(None if n is None else functional.node(n) for n in cotangent_nodes),
        results[len(outputs) : end],
        runs_own_backward=tracing.runs_own_backward,
        usual=usual,
    )
    return _with_parts(joint, recorder.positions, results[end:]), tracing


def _begin(
    paths: ModulePaths, specs: Sequence[InputSpec], options: TraceOptions, warns: bool
) -> Tracing:
    tracing = Tracing(
        paths=paths,
        warns=warns,
        shapes=shapes_of(specs),
        opens_calls=options.opens_calls,
        on_checkpoint=options.on_checkpoint,
    )
    if options.whole_calls:
        tracing.on_function = FunctionCalls(tracing)
    return tracing


def _with_parts(joint: Joint, positions: Sequence[int], values: Sequence[fx.Node]) -> Joint:
    if not values:
        return joint
    parts = list(zip(positions, values, strict=True))
    return replace(joint, parts=choose_parts(parts, joint.gradients, joint.forward_nodes))


def _run_body(
    body: Body,
    tracing: Tracing,
    leaves: Sequence[Tensor],
    specs: Sequence[InputSpec],
    grad_enabled: bool,
    recorder: PartRecorder,
) -> tuple[list[Tensor], list[Any]]:
    """Return the inputs that the body may write to, captured ones last, and its outputs."""
    with torch.set_grad_enabled(grad_enabled):
        given = [_writable(tracing, t, spec) for t, spec in zip(leaves, specs, strict=True)]
        layouts = [(tuple(t.shape), t.stride()) for t in given]
        is_shared = [not s.is_leaf for s in specs]
        recorder.expect({i: t for i, t in enumerate(given) if is_shared[i]})
        outputs = body.run(tracing, given)
    inputs = [*given, *tracing.captured_inputs]
    captured = enumerate(tracing.captured_specs, len(given))
    recorder.expect({i: inputs[i] for i, spec in captured if not spec.is_leaf})
    layouts += [(tuple(s.shape), s.stride) for s in tracing.captured_specs]
    _refuse_changed_layout(inputs, layouts)
    return inputs, [tracing.lift(o) if isinstance(o, Tensor) else o for o in outputs]


def _refuse_changed_layout(tensors: Sequence[Tensor], before: Sequence[Any]) -> None:
    with _torch.without_function_modes():
        for tensor, layout in zip(tensors, before, strict=True):
            if (tuple(tensor.shape), tensor.stride()) != layout:
                raise EffectError(
                    "the function changes the layout of a tensor that it is given or closes over, "
                    f"of shape {layout[0]}, in place (t_, resize_): a graph cannot. Make a "
                    "new tensor."
                )


def _writable(tracing: Tracing, tensor: Tensor, spec: InputSpec) -> Tensor:
    """Only leaves refuse to be written to in place."""
    if spec.is_leaf or not tensor.requires_grad:
        return tensor
    return _NoLeaf.apply(tracing, tensor, spec)  # type: ignore[no-untyped-call,no-any-return]


class _NoLeaf(torch.autograd.Function):
    """Makes a second fake tensor for an input, which autograd takes for computed from the first."""

    @staticmethod
    def forward(ctx: Any, tracing: Tracing, leaf: Tensor, spec: InputSpec) -> Tensor:
        return tracing.alias_input(leaf, spec)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor, None]:
        return None, cotangent, None


def is_differentiated(tensor: Tensor) -> bool:
    """Whether the gradient of a tensor of a trace may reach an input.

    A view that `no_grad` makes of a leaf says as the leaf does that it requires one.
    """
    has_node = tensor.grad_fn is not None or not _torch.is_view(tensor)
    return tensor.requires_grad and has_node


def usual_outputs(outputs: Sequence[Any], num_escaped: int = 0) -> tuple[int, ...]:
    """The positions of the outputs that have a cotangent in a training step.

    A scalar that the function returns is a loss, and what it is computed from has no gradient of
    its own: logits, or the parts of a sum. Nor has what comes after a loss, as models return other
    things after theirs. What comes before has one, for a loss outside: `(y, auxiliary_loss)`. Where
    there is a loss, the last `num_escaped`, which the function leaves elsewhere, have none.
    """
    given = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and is_differentiated(o)]
    returned = [i for i in given if i < len(outputs) - num_escaped]
    scalars = [i for i in returned if outputs[i].dim() == 0]
    if not scalars:
        return tuple(given)
    if len(returned) == 1:
        return tuple(returned)
    nodes = {i: torch.autograd.graph.get_gradient_edge(outputs[i]).node for i in returned}
    before = _nodes_before([nodes[i] for i in scalars])
    asked = [i for i in returned if i < scalars[0] or i in scalars]
    return tuple(i for i in asked if nodes[i] not in before)


def _nodes_before(nodes: Sequence[Any]) -> set[Any]:
    """The nodes of autograd's graph that those of `nodes` lead to, without themselves."""
    found: set[Any] = set()
    left = [following for node in nodes for following, _ in node.next_functions]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found


def _add_cotangents(
    tracing: Tracing, outputs: Sequence[Any], options: TraceOptions, usual: tuple[int, ...]
) -> list[Tensor | None]:
    if not options.with_gradients:
        return [None] * len(outputs)
    wanted = usual if options.only_usual else options.wanted_outputs
    cotangents: list[Tensor | None] = []
    for i, output in enumerate(outputs):
        differentiable = isinstance(output, Tensor) and is_differentiated(output)
        if not differentiable or (wanted is not None and i not in wanted):
            cotangents.append(None)
            continue
        with tracing.pause_recording(), torch.no_grad():
            spec = InputSpec.of(output.detach())
        cotangents.append(tracing.input(spec, f"cotangent_{i}"))
    return cotangents


def _differentiate(
    leaves: Sequence[Tensor],
    outputs: Sequence[Any],
    cotangents: Sequence[Tensor | None],
    create_graph: bool,
    recorder: PartRecorder,
) -> list[Tensor | None]:
    wrt = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    chosen = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
    given: list[Tensor] = [cotangents[i] for i in chosen]  # type: ignore[misc]
    roots = [outputs[i] for i in chosen]
    recorder.watch(roots, given)
    found = gradients(roots, [leaves[i] for i in wrt], given, create_graph=create_graph)
    grads: list[Tensor | None] = [None] * len(leaves)
    for i, grad in zip(wrt, found, strict=True):
        grads[i] = grad
    return grads


def _refuse_differentiable_writes(
    mutations: Sequence[tuple[int, fx.Node]], inputs: Sequence[Tensor]
) -> None:
    for i, value in mutations:
        if inputs[i].requires_grad:
            raise EffectError(
                f"the function writes in place, through {value.target} at "
                f"{notes_of(value).source}, to an input that has a gradient: its caller would go "
                "on with a value whose derivative is lost. Write to a copy (x.clone()), or return "
                "the new value."
            )

"""The joint graph that AOTAutograd traces, in the words of this library.

AOTAutograd writes down what autograd does as `autodiff.joint` does: `primals_*` are the inputs,
`tangents_*` the cotangents, and the outputs are those of the function, new values of inputs that it
writes to among them, and then the gradients. Modules and lines of the user's are there too, in the
words of Dynamo.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.compile.copies import writes_input
from torchremat.graph.dynamo_meta import module_name, source_of


def joint_of(module: fx.GraphModule, num_forward_outputs: int) -> Joint:
    """The joint graph `module` of AOTAutograd; notes the phase, module and line of each node."""
    inputs: list[fx.Node] = []
    cotangents: list[fx.Node] = []
    for node in module.graph.find_nodes(op="placeholder"):
        (cotangents if "tangents" in str(node.target) else inputs).append(node)
    _note_phases(module.graph, cotangents)
    for node in module.graph.nodes:
        if node.op != "placeholder":
            node.meta["module"] = module_name(node.meta)
            node.meta["source"] = source_of(node.meta)
    (output,) = module.graph.find_nodes(op="output")
    results: Sequence[Any] = output.args[0]
    written = _torch.written_inputs(module)
    mutations = [(node, results[i]) for i, node in written.items()]
    mutations += [node.args[:2] for node in module.graph.nodes if writes_input(node)]
    return Joint(
        module,
        tuple(inputs),
        tuple(r for i, r in enumerate(results[:num_forward_outputs]) if i not in written),
        tuple((inputs.index(node), value) for node, value in mutations),
        tuple(cotangents),
        tuple(results[num_forward_outputs:]),
        by_compiler=True,
    )


def _note_phases(graph: fx.Graph, cotangents: Sequence[fx.Node]) -> None:
    """Whether a node was traced forward or backward; one that is no older than a pass, by need."""
    late = set(cotangents)
    for node in graph.nodes:
        is_late = node.meta.get("partitioner_tag") in _BACKWARD_TAGS
        if is_late or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        if node.op != "placeholder":
            node.meta["phase"] = "backward" if node in late else "forward"


_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")

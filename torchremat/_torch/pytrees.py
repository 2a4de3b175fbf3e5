"""Trees of PyTorch: `torch.utils._pytree`."""

from collections.abc import Sequence

from torch.utils import _pytree

TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_unflatten = _pytree.tree_unflatten
tree_map = _pytree.tree_map
keystr = _pytree.keystr
register_pytree_node = _pytree.register_pytree_node
GetAttrKey = _pytree.GetAttrKey
SequenceKey = _pytree.SequenceKey


def children_of(spec: TreeSpec) -> Sequence[TreeSpec]:
    children = getattr(spec, "children", None)  # a method since PyTorch 2.12 or so
    return children() if callable(children) else spec.children_specs

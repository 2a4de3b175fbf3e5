"""Our notes on nodes are read and written in one file; no object's `__dict__` is written into."""

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import Source, Violation, plant, read_package, refuse

NOTES = "torchremat/graph/notes.py"
# what stands in PyTorch while a patch is entered writes the module that it replaces
WRITES_OF_DICT = {"torchremat/_torch/replacements.py"}
# the keys of torch.fx, AOTAutograd, Dynamo and torch.utils.checkpoint
KEYS_OF_TORCH = {
    "ac_graph_id",
    "autograd_backward",
    "custom",
    "desc",
    "eager_input_vals",
    "example_value",
    "from_node",
    "fwd_nn_module_stack",
    "fwd_source_fn_stack",
    "has_backward_hook",
    "is_gradient_acc",
    "nn_module_stack",
    "original_aten",
    "partitioner_tag",
    "recompute",
    "seq_nr",
    "source_fn_stack",
    "stack_trace",
    "tensor_meta",
    "torch_fn",
    "unbacked_bindings",
    "unleaf",
    "user_visible_output_idxs",
    "val",
}


def find_keys(source: Source) -> Iterator[Violation]:
    """Keys of `.meta` that are not torch's; a key that is not spelled out may be any."""
    for where, key in _keys(source):
        if not (isinstance(key, ast.Constant) and key.value in KEYS_OF_TORCH):
            yield source.violation(where, f"meta key {ast.unparse(key)}")


def _keys(source: Source) -> Iterator[tuple[ast.AST, ast.expr]]:
    for node in source.find(ast.Subscript):
        if _is_meta(node.value):
            yield node, node.slice
    for node in source.find(ast.Compare):
        if isinstance(node.ops[0], ast.In | ast.NotIn) and _is_meta(node.comparators[0]):
            yield node, node.left
    for node in source.find(ast.Call):
        if not isinstance(node.func, ast.Attribute) or not _is_meta(node.func.value):
            continue
        if node.func.attr in ("get", "pop", "setdefault"):
            yield node, node.args[0]
        elif node.func.attr == "update":
            yield from ((node, ast.Constant(k.arg)) for k in node.keywords if k.arg)
            displays = [arg for arg in node.args if isinstance(arg, ast.Dict)]
            yield from ((node, key) for arg in displays for key in arg.keys if key)


def _is_meta(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "meta") or (
        isinstance(node, ast.Name) and node.id == "meta"
    )


def find_writes_of_dict(source: Source) -> Iterator[Violation]:
    """Writes of an item of `x.__dict__` or `vars(x)`; `update` copies a whole object, and may."""
    for node in source.find(ast.Subscript):
        if not isinstance(node.ctx, ast.Load) and _is_dict(node.value):
            yield source.violation(node, f"{ast.unparse(node)} = ...")


def _is_dict(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "vars"
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def violations() -> Iterator[Violation]:
    for source in read_package():
        if source.path not in WRITES_OF_DICT:
            yield from find_writes_of_dict(source)
        if source.path != NOTES:
            yield from find_keys(source)


def test_notes_are_in_one_file():
    refuse(violations())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node.meta['phase'] = 1", ["'phase'"]),
        ("node.meta.get('phase', 3)", ["'phase'"]),
        ("meta.setdefault(KEY, 3)", ["KEY"]),
        ("'phase' not in node.meta", ["'phase'"]),
        ("node.meta.update(phase=1, val=2)", ["'phase'"]),
        ("node.meta.update({'phase': 1, **other})", ["'phase'"]),
        ("node.meta['val'] = other.meta.pop('tensor_meta')", []),
        ("new.meta = dict(old.meta)", []),
    ],
)
def test_own_keys_are_found(text, expected):
    assert [v.text.removeprefix("meta key ") for v in find_keys(plant(text))] == expected


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("x.__dict__['joint'] = 1", 1),
        ("del x.__dict__['joint']", 1),
        ("vars(x)['joint'] = 1", 1),
        ("x.__dict__.update(y), x.__dict__.get('joint'), x.__dict__['joint']", 0),
    ],
)
def test_writes_of_dict_are_found(text, num_found):
    assert len(list(find_writes_of_dict(plant(text)))) == num_found

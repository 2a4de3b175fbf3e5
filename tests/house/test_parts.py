"""Each private or experimental name of PyTorch that `_torch` uses has a row, and no row is left."""

from collections.abc import Iterator, Sequence

import pytest

from tests.house.private_names import find_names
from tests.house.source import Source, Violation, plant, read_package, refuse
from torchremat._torch.parts import ALTERNATIVES, all_parts
from torchremat._torch.patches import EVERY_PATCH

ROOM = "torchremat/_torch/"
TABLE = f"{ROOM}parts/"


def find_violations(sources: Sequence[Source], rows: Sequence[str]) -> Iterator[Violation]:
    """Names without a row, and rows without a use; modules of names count with those."""
    by_attribute = {f".{row.rpartition('.')[2]}" for row in rows}
    modules = {row.rsplit(".", n)[0] for row in rows for n in range(1, row.count("."))}
    used = set()
    for source in sources:
        for line, name in find_names(source):
            used.add(name.rpartition(".")[2])
            if name not in modules.union(rows) and name not in by_attribute:
                yield source.violation(line, f"{name} has no row in {TABLE}")
    for row in rows:
        if row.rpartition(".")[2] not in used:
            yield Violation(TABLE, 1, f"nothing uses {row}")


def violations() -> Iterator[Violation]:
    sources = [
        source
        for source in read_package()
        if source.path.startswith(ROOM) and not source.path.startswith(TABLE)
    ]
    return find_violations(sources, [name for part in all_parts() for name in part.names])


def test_every_private_name_has_a_row():
    refuse(violations())


def test_every_patch_says_what_was_tried_in_its_place():
    assert ALTERNATIVES.keys() == {f"{patch.owner}.{patch.name}" for patch in EVERY_PATCH}


def test_no_name_has_two_rows():
    names = [name for part in all_parts() for name in part.names]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch import _C\n_C._get_x()", "torch._C._get_x"),
        ("import torch\ntorch._C._autograd._pop()", "torch._C._autograd._pop"),
        ("import torch\ntorch._guards.Context.try_get()", "torch._guards.Context"),
        ("import torch\ntorch.ops.aten._fused.default(x)", "torch.ops.aten._fused"),
        ("from torch.fx.experimental import a\na.f", "torch.fx.experimental.a.f"),
        ("x.node._expr", "._expr"),
        ("getattr(x, '_timeout', None)", "._timeout"),
        ("self._own, x.__class__", None),
        ("from torch import fx\nfx.Graph", None),
    ],
)  # fmt: skip
def test_names_without_a_row_are_found(text, name):
    found = {v.text for v in find_violations([plant(text)], [])}
    assert (f"{name} has no row in {TABLE}" in found) == (name is not None)
    assert name is not None or not found


def test_rows_without_a_use_are_found():
    (found,) = find_violations([plant("x._version")], ["torch.Tensor._version", "torch.Tensor._y"])
    assert found.text == "nothing uses torch.Tensor._y"

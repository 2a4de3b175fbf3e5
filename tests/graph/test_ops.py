import importlib.resources
import re

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from torchremat import name_p
from torchremat.core.avals import Aval
from torchremat.errors import PolicyError, PolicyValueError
from torchremat.graph import ops
from torchremat.graph.ops import (
    as_op_matcher,
    is_dot,
    is_dot_with_no_batch_dims,
    join_arguments,
    op_name,
    packet_name,
    split_arguments,
    why_unknown,
)

aten = torch.ops.aten
X = Aval((2, 3), torch.float32)
Y = Aval((3, 4), torch.float32)


def traced_ops(function, *args):
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    return [node.target for node in graph.nodes if node.op == "call_function"]


# --- dots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dot", "no_batch_dims"),
    [
        (aten.mm.default, True, True),
        (aten.mm.out, True, True),
        (aten.addmm.default, True, True),
        (aten.mv.default, True, True),
        (aten.addmv.default, True, True),
        (aten.dot.default, True, True),
        (aten.linear.default, True, True),
        (aten._int_mm.default, True, True),
        (aten._scaled_mm.default, True, True),
        (aten.addbmm.default, True, True),
        (aten.bmm.default, True, False),
        (aten.baddbmm.default, True, False),
        (aten._grouped_mm.default, True, False),
        (aten.convolution.default, True, False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, True, False),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, False, False),
        (aten.convolution_backward.default, False, False),
        (aten.addr.default, False, False),
        (aten.mul.Tensor, False, False),
        (name_p, False, False),
        (max, False, False),
    ],
    ids=op_name,
)
def test_dots(op, dot, no_batch_dims):
    assert is_dot(op) == dot
    assert is_dot_with_no_batch_dims(op) == no_batch_dims


def test_flex_attention_is_a_dot():
    pytest.importorskip("torch.nn.attention.flex_attention")
    assert is_dot(torch.ops.higher_order.flex_attention)
    assert not is_dot(torch.ops.higher_order.flex_attention_backward)


@pytest.mark.parametrize(
    ("ranks", "expected"), [((2, 2), True), ((3, 2), True), ((2, 3), True), ((3, 3), False)]
)
def test_matmul_has_batch_dims_if_both_operands_have(ranks, expected):
    avals = [Aval((4,) * rank, torch.float32) for rank in ranks]
    assert is_dot_with_no_batch_dims(aten.matmul.default, *avals) == expected


@pytest.mark.parametrize(
    ("function", "shapes", "no_batch_dims"),
    [
        (F.linear, [(2, 3), (4, 3)], True),
        (F.linear, [(2, 5, 3), (4, 3), (4,)], True),
        (torch.matmul, [(2, 5, 3), (2, 3, 4)], False),
        (lambda x, y: torch.einsum("bij,bjk->bik", x, y), [(2, 5, 3), (2, 3, 4)], False),
        (F.conv1d, [(1, 2, 9), (3, 2, 3)], False),
        (F.conv_transpose2d, [(1, 2, 9, 9), (2, 3, 3, 3)], False),
        (F.scaled_dot_product_attention, [(1, 2, 4, 8)] * 3, False),
        (F.bilinear, [(2, 3), (2, 4), (5, 3, 4)], False),
    ],
)
def test_each_dot_of_a_trace_is_found(function, shapes, no_batch_dims):
    tensors = [torch.ones(shape) for shape in shapes]
    dots = [op for op in traced_ops(function, *tensors) if is_dot(op)]
    assert len(dots) == 1
    assert is_dot_with_no_batch_dims(dots[0]) == no_batch_dims


# names that look like a dot's and are none: derivatives, packing, and what only sounds alike
NOT_DOTS = re.compile(
    r"backward|gamma|linear_combination|cumm|hamming|upsample|convert_|reorder_|_search$"
    r"|pack_|prepack|quantize_weight|dummy|^addr$|conv\w*_double"
)


def test_no_operator_of_this_pytorch_that_looks_like_a_dot_is_forgotten():
    file = importlib.resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    names = set(re.findall(r"^- func: (\w+?)_?[.(]", file.read_text(encoding="utf-8"), re.M))
    looks = re.compile(r"mm|mv|dot|matmul|linear|conv|attention|bilinear|addr")
    known = {name.removeprefix("aten.") for name in ops._DOTS}
    looked_at = {name for name in names if looks.search(name)}
    assert {name for name in looked_at - known if not NOT_DOTS.search(name)} == set()
    assert len(known & looked_at) > 80


def test_the_sets_of_dots_are_disjoint():
    groups = [
        ops.MATMULS_WITHOUT_BATCH_DIMS,
        ops.MATMULS_WITH_BATCH_DIMS,
        ops.CONVOLUTIONS,
        ops.ATTENTION,
    ]
    assert sum(map(len, groups)) == len(frozenset().union(*groups))


# --- which op is meant ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        aten.mm,
        aten.mm.default,
        "aten.mm",
        "aten::mm",
        "aten.mm.default",
        "aten::mm.default",
        " aten.mm ",
    ],
)
def test_mm_in_every_spelling_finds_what_a_linear_is(spec):
    matcher = as_op_matcher(spec)
    assert matcher.matches(aten.mm.default)
    assert matcher.matches(aten.addmm.default)
    assert not matcher.matches(aten.bmm.default)


def test_addmm_does_not_find_mm():
    assert not as_op_matcher("aten.addmm").matches(aten.mm.default)


def test_a_packet_finds_every_overload_and_an_overload_itself():
    assert as_op_matcher(aten.add).matches(aten.add.Scalar)
    assert as_op_matcher("aten.add").matches(aten.add.Tensor)
    assert not as_op_matcher(aten.add.Tensor).matches(aten.add.Scalar)
    assert not as_op_matcher("aten::add.Tensor").matches(aten.add.Scalar)


@pytest.mark.parametrize("spec", [name_p, "higher_order.name_p", "torchremat.name_p"])
def test_higher_order_ops_are_found(spec):
    assert as_op_matcher(spec).matches(name_p)
    assert not as_op_matcher(spec).matches(aten.mm.default)
    assert as_op_matcher(spec).name == "higher_order.name_p"


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("aten.mmm", r"knows no operator of that name, nearest: 'aten.mm'"),
        ("aten.scaled_dot_product", r"nearest: .*scaled_dot_product"),
        ("aten.add.Tenser", r"nearest: 'aten.add.Tensor'"),
        ("aten.add.Tensor.x", r"knows no operator"),
        ("nolib.foo", r"knows no operator of that name, there are none"),
        ("higher_order.nam_p", r"knows no operator"),
        ("nothing", r"knows no operator"),
        ("aten.__name__", r"knows no operator"),
    ],
)
def test_an_unknown_op_matches_nothing_and_there_are_nearest_names(spec, match):
    assert not as_op_matcher(spec).matches(aten.mm.default)
    assert re.search(match, why_unknown(as_op_matcher(spec).name))


def test_a_name_of_an_op_is_not_empty():
    with pytest.raises(PolicyValueError, match=r"'' names no operator"):
        as_op_matcher("")


@pytest.mark.parametrize("spec", ["mm", "torch.ops.aten.mm", "aten::mm", " aten.mm "])
def test_names_of_ops_have_one_normal_form(spec):
    assert as_op_matcher(spec).name == "aten.mm"
    assert why_unknown("aten.mm") == ""


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (3, r"3 \(int\) is not an operator. An operator is an overload"),
        (None, r"None \(NoneType\) is not an operator"),
        (torch.mm, r"for the Python function mm write 'aten.mm'"),
        (["aten.mm"], r"\(list\) is not an operator"),
    ],
)
def test_what_is_no_op_is_a_type_error(spec, match):
    with pytest.raises(PolicyError, match=match) as info:
        as_op_matcher(spec)
    assert isinstance(info.value, TypeError)


def test_names():
    assert [op_name(op) for op in (aten.add, aten.add.Tensor, name_p, max)] == [
        "aten.add",
        "aten.add.Tensor",
        "higher_order.name_p",
        "max",
    ]
    assert packet_name(aten.add.Tensor) == packet_name(aten.add) == "aten.add"
    assert packet_name(aten.mm.default) == "aten.mm"


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "avals", "params"),
    [
        (aten.mm.default, (X, Y), {}, (X, Y), {}),
        (aten.add.Tensor, (X, X), {"alpha": 2}, (X, X), {"alpha": 2}),
        (aten.mul.Scalar, (X, 2.0), {}, (X,), {"other": 2.0}),
        (aten.pow.Scalar, (2, X), {}, (X,), {"self": 2}),
        (
            aten.sum.dim_IntList,
            (X, [0], True),
            {},
            (X,),
            {"dim": [0], "keepdim": True, "dtype": None},
        ),
        (aten.cat.default, ([X, X], 1), {}, (X, X), {"tensors": [X, X], "dim": 1}),
        (aten.index.Tensor, (X, [None, Y]), {}, (X, Y), {"indices": [None, Y]}),
        (
            aten.native_layer_norm.default,
            (X, [3], None, Y, 1e-5),
            {},
            (X, Y),
            {"normalized_shape": [3], "weight": None, "eps": 1e-5},
        ),
        (aten.clamp.Tensor, (X, None, Y), {}, (X, Y), {"min": None}),
        (name_p, (X,), {"name": "a"}, (X,), {"name": "a"}),
        (name_p, (X, 3, [Y], X), {"t": Y}, (X, Y, X, Y), {"arg1": 3, "arg2": [Y], "t": Y}),
    ],
    ids=lambda value: op_name(value) if not isinstance(value, tuple | dict) else "",
)
def test_arguments_are_split_and_joined(op, args, kwargs, avals, params):
    assert split_arguments(op, args, kwargs) == (avals, params)
    assert join_arguments(op, avals, params) == (args, kwargs)


def test_defaults_are_shown_and_left_out_again():
    avals, params = split_arguments(aten.addmm.default, (X, X, Y), {})
    assert params == {"beta": 1, "alpha": 1}
    assert join_arguments(aten.addmm.default, avals, params) == ((X, X, Y), {})
    avals, params = split_arguments(aten.sum.dim_IntList, (X, [1]), {"keepdim": False})
    assert join_arguments(aten.sum.dim_IntList, avals, params) == ((X, [1]), {})


def test_arguments_given_by_keyword_are_in_the_order_of_the_schema():
    assert split_arguments(aten.mm.default, (), {"mat2": Y, "self": X})[0] == (X, Y)

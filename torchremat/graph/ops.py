"""Facts about operators: their names, what is a dot, which op a user means, how arguments bind.

The sets hold names, not operators: a name that another PyTorch lacks is never looked up. They were
read from `native_functions.yaml` of PyTorch 2.13. `tests/graph/test_ops.py` fails on an operator of
another version whose name looks like a dot's and that no set mentions.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchremat._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_arguments
from torchremat.core.avals import Aval
from torchremat.errors import PolicyError, PolicyValueError, nearest_names

# fmt: off
# Every dimension is contracted, or free in one operand: what it costs to save (the free ones) has
# nothing to do with what it costs to compute. `addbmm` is one of them: it contracts the batch.
MATMULS_WITHOUT_BATCH_DIMS = frozenset({
    "mm", "addmm", "_addmm_activation", "mv", "addmv", "dot", "vdot", "addbmm", "linear",
    "chain_matmul", "linalg_multi_dot", "tensordot", "_foreach_mm",
    # low precision and packed weights
    "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_addmm",
    "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu",
    "_weight_int4pack_mm_with_scales_and_zeros", "_weight_int8pack_mm", "_dyn_quant_matmul_4bit",
    "_mixed_dtypes_linear", "mkldnn_linear", "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation", "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation", "_wrapped_quantized_linear_prepacked",
    # sparse
    "_sparse_mm", "_sparse_addmm", "_sparse_sparse_matmul", "_sparse_mm_reduce_impl",
    "smm", "hspmm", "sspaddmm", "_cslt_sparse_mm", "_sparse_semi_structured_linear",
    "_sparse_semi_structured_mm", "_sparse_semi_structured_addmm",
})

MATMULS_WITH_BATCH_DIMS = frozenset({
    "bmm", "baddbmm", "matmul", "linalg_matmul", "linalg_vecdot", "bilinear", "_trilinear",
    "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "sparse_sampled_addmm",
})

CONVOLUTIONS = frozenset({
    "convolution", "_convolution", "_convolution_mode", "convolution_overrideable",
    "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "_conv_depthwise2d", "conv_depthwise3d", "thnn_conv2d", "_slow_conv2d_forward",
    "slow_conv3d", "slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d",
    "slow_conv_transpose2d", "slow_conv_transpose3d",
    "cudnn_convolution", "cudnn_convolution_relu", "cudnn_convolution_add_relu",
    "cudnn_convolution_transpose",
    "miopen_convolution", "miopen_convolution_relu", "miopen_convolution_add_relu",
    "miopen_convolution_transpose", "miopen_depthwise_convolution",
    "mkldnn_convolution", "_mps_convolution", "_mps_convolution_transpose",
    "_nnpack_spatial_convolution",
})

ATTENTION = frozenset({
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace",
    "_efficient_attention_forward", "_cudnn_attention_forward",
    "_cudnn_attention_forward_no_dropout_inplace",
    "_triton_scaled_dot_attention", "_triton_multi_head_attention", "_native_multi_head_attention",
})
# fmt: on

# Not dots: `addr`, `outer` and `ger` contract nothing (they cost no more to compute than to read);
# the recurrent kernels (`_cudnn_rnn`, `_thnn_fused_lstm_cell`) and `_cdist_forward` are more than
# chains of dots. Derivatives are no dots either, since policies decide on forward passes.
_DOTS = frozenset(
    f"aten.{name}"
    for name in MATMULS_WITHOUT_BATCH_DIMS | MATMULS_WITH_BATCH_DIMS | CONVOLUTIONS | ATTENTION
) | {"higher_order.flex_attention"}
_DOTS_WITHOUT_BATCH_DIMS = frozenset(f"aten.{name}" for name in MATMULS_WITHOUT_BATCH_DIMS)
_DOTS_BY_RANK = frozenset({"aten.matmul", "aten.linalg_matmul"})

# Autograd keeps more of these than the first derivative of an output reads: `svdvals` needs U and
# V, and its second derivative S; `solve` needs the factors, and with `create_graph` the matrix.
_FACTORISATIONS = frozenset(
    f"aten.{name}"
    for name in (
        "_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_qr", "linalg_lu",
        "linalg_lu_factor_ex", "linalg_cholesky_ex", "linalg_ldl_factor_ex", "_linalg_det",
        "_linalg_slogdet", "_linalg_solve_ex", "linalg_inv_ex", "linalg_lstsq",
    )
)  # fmt: skip


def is_factorisation(op: object) -> bool:
    """Whether the second derivative of `op` may read values that the first does not.

    >>> import torch
    >>> is_factorisation(torch.ops.aten._linalg_svd.default)
    True
    """
    return packet_name(op) in _FACTORISATIONS


# They read nothing of their tensor arguments but shape, layout and dtype.
_DRAWS_BY_SHAPE = frozenset(
    f"aten.{name}"
    for name in (
        "bernoulli", "uniform", "normal_functional", "exponential", "geometric", "log_normal",
        "cauchy", "random", "rand", "randn", "randint", "randperm", "rand_like", "randn_like",
        "randint_like",
    )
)  # fmt: skip


def draws_by_shape(op: object) -> bool:
    """Whether `op` draws random numbers, and reads nothing of its tensor arguments but the shape.

    >>> import torch
    >>> draws_by_shape(torch.ops.aten.bernoulli.p), draws_by_shape(torch.ops.aten.bernoulli.default)
    (True, False)
    """
    if op is torch.ops.aten.bernoulli.default:  # its argument has the probabilities
        return False
    return packet_name(op) in _DRAWS_BY_SHAPE


# what finds an op finds these too: `nn.Linear` is an mm, and with a bias an addmm
_FOUND_WITH = {"aten.mm": frozenset({"aten.addmm"})}

_AMONG_PROCESSES = ("_c10d_functional.", "c10d_functional.", "_dtensor.", "c10d.")


def op_name(op: object) -> str:
    """The full name of an op, as `torch.ops` spells it.

    >>> import torch
    >>> op_name(torch.ops.aten.add.Tensor), op_name(torch.ops.aten.mm)
    ('aten.add.Tensor', 'aten.mm')
    """
    if isinstance(op, OpOverload | OpOverloadPacket):
        return str(op)
    if isinstance(op, HigherOrderOperator):
        return f"higher_order.{op.name()}"
    return str(getattr(op, "__name__", op))


def packet_name(op: object) -> str:
    """The name of an op without its overload: `'aten.add'` for `aten.add.Tensor`."""
    if isinstance(op, OpOverload):
        return str(op.name()).partition(".")[0].replace("::", ".")
    return op_name(op)


def communicates(op: object, kwargs: Mapping[str, object]) -> bool:
    """Whether a call of `op` is a collective, which all processes run in one order."""
    over_processes = "group" in kwargs and getattr(op, "is_over_axis", False)
    return over_processes or packet_name(op).startswith(_AMONG_PROCESSES)


def is_dot(op: object) -> bool:
    """Whether `op` is a matrix multiplication, a convolution or scaled-dot-product attention.

    >>> import torch
    >>> is_dot(torch.ops.aten.bmm.default), is_dot(torch.ops.aten.convolution_backward.default)
    (True, False)
    """
    return packet_name(op) in _DOTS


def is_dot_with_no_batch_dims(op: object, *avals: Aval) -> bool:
    """Whether `op` is a matrix multiplication whose dimensions are all contracted or free.

    Of `matmul`, which is many, the ranks of `avals` tell: a batch has both operands above rank 2.

    >>> import torch
    >>> is_dot_with_no_batch_dims(torch.ops.aten.addmm.default)
    True
    >>> is_dot_with_no_batch_dims(torch.ops.aten.bmm.default)
    False
    """
    name = packet_name(op)
    if name in _DOTS_BY_RANK:
        return bool(avals) and min(len(aval.shape) for aval in avals) <= 2
    return name in _DOTS_WITHOUT_BATCH_DIMS


@dataclass(frozen=True, slots=True)
class OpMatcher:
    """Finds an op by name: an overload (`aten.add.Tensor`) or all of a packet's (`aten.add`)."""

    name: str

    def __str__(self) -> str:
        return self.name

    def matches(self, op: object) -> bool:
        packet = packet_name(op)
        if self.name in (packet, op_name(op)):
            return True
        return packet in _FOUND_WITH.get(self.name.removesuffix(".default"), ())


def as_op_matcher(spec: object) -> OpMatcher:
    """The matcher of the op that `spec` means: an overload, a packet, or the name of either.

    Names are written `"aten.mm"`, `"aten::mm"`, `"aten.mm.default"`; those of higher-order ops
    `"higher_order.flex_attention"`, of this library's own also `"torchremat.name_p"`. A name that
    PyTorch does not know matches nothing (`why_unknown`): its library may be imported later.
    Raises `PolicyError` (a `TypeError`) for what is none of these, and `PolicyValueError` (a
    `ValueError`) for an empty name.

    >>> import torch
    >>> as_op_matcher("aten::mm").matches(torch.ops.aten.addmm.default)
    True
    >>> as_op_matcher(torch.ops.aten.add.Tensor).matches(torch.ops.aten.add.Scalar)
    False
    """
    if isinstance(spec, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return OpMatcher(op_name(spec))
    if isinstance(spec, str):
        if not spec.strip():
            raise PolicyValueError(
                f"{spec!r} names no operator. An operator is written 'aten.mm' or 'aten.mm.default'"
            )
        return OpMatcher(_normal_name(spec))
    raise PolicyError(
        f"{spec!r} ({type(spec).__name__}) is not an operator. An operator is an overload "
        "(torch.ops.aten.mm.default), a packet (torch.ops.aten.mm) or a string ('aten.mm')"
        + _python_function_cure(spec)
    )


def _python_function_cure(spec: object) -> str:
    name = getattr(spec, "__name__", "")
    if not callable(spec) or not hasattr(torch.ops.aten, name):
        return ""
    return f"; for the Python function {name} write 'aten.{name}'"


def why_unknown(name: str) -> str:
    """The sentence of an error on a name that PyTorch does not know; `''` if it does.

    >>> why_unknown("aten.mm")
    ''
    >>> print(why_unknown("aten.mmm"))
    PyTorch ... knows no operator of that name, nearest: 'aten.mm', 'aten.smm', 'aten.bmm'
    """
    if _operator_called(name) is not None:
        return ""
    qualified = name if "." in name else f"aten.{name}"
    near = nearest_names(qualified, _names_like(qualified))
    return f"PyTorch {torch.__version__} knows no operator of that name, {near}"


def _operator_called(name: str) -> object | None:
    namespace, *rest = name.split(".")
    if len(rest) not in (1, 2):
        return None
    found: Any = getattr(torch.ops, namespace, None)
    for part in rest:
        found = getattr(found, part, None)
    is_one = isinstance(found, OpOverload | OpOverloadPacket | HigherOrderOperator)
    return found if is_one else None


def _normal_name(spec: str) -> str:
    name = spec.strip().removeprefix("torch.ops.").replace("::", ".")
    library, _, own = name.partition(".")
    if library == "torchremat" and not hasattr(torch.ops.torchremat, own.partition(".")[0]):
        name = f"higher_order.{own}"
    if not own and isinstance(getattr(torch.ops.higher_order, name, None), HigherOrderOperator):
        name = f"higher_order.{name}"
    if not own and _operator_called(f"aten.{name}") is not None:
        name = f"aten.{name}"
    return name


def _names_like(name: str) -> set[str]:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    operators = getattr(torch.ops, namespace, ())
    found = getattr(operators, packet, None) if overload else None
    if isinstance(found, OpOverloadPacket):
        return {f"{namespace}.{packet}.{known}" for known in found.overloads()}
    known = {known for known in dir(operators) if not known.startswith("__")} - {"name", "_dir"}
    suggested = {f"{namespace}.{known}" for known in known}
    return suggested | (_DOTS if namespace == "aten" else set())


# --- arguments -----------------------------------------------------------------------------------


def split_arguments(
    op: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Aval, ...], dict[str, Any]]:
    """Split the arguments of a call, in which each tensor is an `Aval`, as a policy sees them.

    `avals` are all of them, in the order of the schema. `params` are the other arguments by name,
    with the schema's defaults for those not given. A list of tensors is in `params` too, as a list
    of avals, since only there one sees where it ends. A higher-order op has no schema: its
    positional arguments are called `arg0`, `arg1`, ..., and all its keywords are in `params`.

    >>> import torch
    >>> x = Aval((2,), torch.float32)
    >>> split_arguments(torch.ops.aten.add.Tensor, (x, x), {})
    ((f32[2], f32[2]), {'alpha': 1})
    >>> split_arguments(torch.ops.aten.cat.default, ([x, x],), {})
    ((f32[2], f32[2]), {'tensors': [f32[2], f32[2]], 'dim': 0})
    """
    if isinstance(op, OpOverload):
        schema = schema_arguments(op)
        given = dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)
        arguments = {a.name: given.get(a.name, a.default_value) for a in schema}
        params = {name: v for name, v in arguments.items() if not isinstance(v, Aval)}
    else:
        positional = {f"arg{i}": value for i, value in enumerate(args)}
        arguments = positional | dict(kwargs)
        params = {n: v for n, v in positional.items() if not isinstance(v, Aval)} | dict(kwargs)
    return tuple(_avals_in(list(arguments.values()))), params


def join_arguments(
    op: object, avals: Sequence[Aval], params: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `split_arguments` showed as `avals` and `params`.

    As `__torch_dispatch__` does it: trailing arguments that have their default value are left out.

    >>> import torch
    >>> x = Aval((2,), torch.float32)
    >>> join_arguments(torch.ops.aten.cat.default, (x, x), {"tensors": [x, x], "dim": 0})
    (([f32[2], f32[2]],), {})
    """
    if not isinstance(op, OpOverload):
        return _join_without_schema(avals, params)
    left = iter(avals)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    num_kept = 0
    for argument in schema_arguments(op):
        value = argument.default_value
        if argument.name in params:
            value = _consume_avals(left, params[argument.name])
        elif str(argument.type) in ("Tensor", "Optional[Tensor]"):
            value = next(left, value)
        is_default = argument.has_default_value() and equals_default(value, argument.default_value)
        if not argument.kwarg_only:
            args.append(value)
            num_kept = num_kept if is_default else len(args)
        elif not is_default:
            kwargs[argument.name] = value
    return tuple(args[:num_kept]), kwargs


def _join_without_schema(
    avals: Sequence[Aval], params: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional = {name: v for name, v in params.items() if re.fullmatch(r"arg\d+", name)}
    kwargs = {name: v for name, v in params.items() if name not in positional}
    num_positional = len(avals) - len(list(_avals_in(kwargs)))
    left = iter(avals[:num_positional])
    args: list[Any] = []
    while positional:
        name = f"arg{len(args)}"
        args.append(
            _consume_avals(left, positional.pop(name)) if name in positional else next(left)
        )
    return (*args, *left), kwargs


def _consume_avals(left: Iterator[Aval], value: Any) -> Any:
    """Return `value`, and skip the avals that it lists in `left`."""
    for _ in _avals_in(value):
        next(left)
    return value


def name_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that it leaves out.

    >>> name_arguments(torch.ops.aten.sum.dim_IntList, ("x", [0]), {})["keepdim"]
    False
    """
    arguments = schema_arguments(op)
    given = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
    return {a.name: a.default_value for a in arguments} | given


def equals_default(value: object, default: object) -> bool:
    return type(value) is type(default) and bool(value == default)


def _avals_in(value: Any) -> Iterator[Aval]:
    if isinstance(value, Aval):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _avals_in(item)

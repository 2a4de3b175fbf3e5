"""The work of a call of an operator: operations and bytes, from the shapes in a graph alone.

    y = mm(x, w)    f32[64,256] x f32[256,512]: 2 * 64 * 512 * 256 operations
                    reads 65,536 and 524,288 bytes, writes 131,072
    z = exp(y)      10 additions an element; reads 131,072 bytes, writes as many

Symbolic sizes have the values that they had when the graph was traced.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from torchremat import _torch
from torchremat.graph.ops import draws_by_shape, is_factorisation, packet_name
from torchremat.planning.costs.op_signature import Layout, OpSignature, Place

_logger = logging.getLogger("torchremat")
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes of a call.

    Attributes:
        matmul_flops: floating-point operations that PyTorch counts: of matrix products.
        pointwise_flops: other operations, in units of an addition.
        matmul_dtype: what the products are made of.
        reads: bytes of each input, in the order of `node.all_input_nodes`.
        kind: `"conv"` or `"attention"`, if the products are its, else `"matmul"`.
    """

    matmul_flops: int
    pointwise_flops: int
    matmul_dtype: torch.dtype
    reads: tuple[int, ...]
    writes: int
    kind: str


@lru_cache(maxsize=1 << 16)
def work_of(call: OpSignature) -> Work:
    name = packet_name(call.target)
    outputs = call.outputs() or _find_written_inputs(call)
    if not outputs:
        return Work(0, 0, torch.float32, (0,) * len(call.inputs), 0, "matmul")
    tensors = call.tensors()
    touched = outputs if name in _GATHERS else [*tensors, *outputs]
    nbytes = sum(layout.nbytes for layout in outputs)
    flops = matmul_flops(call)
    return Work(
        flops,
        0 if flops else _pointwise_flops(call, name, touched),
        tensors[0].dtype if tensors else torch.float32,
        tuple(_reads(call, name, nbytes)),
        0 if name in _ALLOCATIONS else nbytes,
        _kind_of(name),
    )


def _kind_of(name: str) -> str:
    return next((kind for kind in ("attention", "conv") if kind in name), "matmul")


# They compute what another does for which PyTorch has a formula.
_SAME_FLOPS = {
    "aten._scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        aten._scaled_dot_product_flash_attention_backward
    ),
    "aten._scaled_dot_product_fused_attention_overrideable": (
        aten._scaled_dot_product_flash_attention
    ),
    "aten._scaled_dot_product_fused_attention_overrideable_backward": (
        aten._scaled_dot_product_flash_attention_backward
    ),
    "aten._int_mm": aten.mm,
    "aten._scaled_mm_v2": aten.mm,
}


def _count_grouped_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    # a matrix without a dim for groups is divided among them
    return 2 * min(a.numel() * b.size(-1), b.numel() * a.size(-2))


def _count_rnn(x: Tensor, *weights: Any, **_: Any) -> int:
    """The products of a recurrent layer: each step multiplies by each matrix of weights."""
    listed = weights[0] if isinstance(weights[0], list) else weights[:2]
    numbers = sum(weight.numel() for weight in listed if weight.dim() == 2)
    return 2 * (x.numel() // x.size(-1)) * int(numbers)


def _count_rnn_backward(x: Tensor, *weights: Any, **_: Any) -> int:
    return 2 * _count_rnn(x, *weights)


# PyTorch 2.13 has none for them
_OWN_FORMULAS = {
    "aten._grouped_mm": _count_grouped_mm,
    "aten._scaled_grouped_mm": _count_grouped_mm,
    "aten._scaled_grouped_mm_v2": _count_grouped_mm,
    "aten._cudnn_rnn": _count_rnn,
    "aten.mkldnn_rnn_layer": _count_rnn,
    "aten.mkldnn_rnn_layer_backward": _count_rnn_backward,
    "torchremat.flat_aten__cudnn_rnn_backward": _count_rnn_backward,
}


def has_formula(target: object) -> bool:
    return _formula_of(target) is not None


def _formula_of(target: Any) -> Any:
    packet = target.overloadpacket if isinstance(target, _torch.OpOverload) else target
    name = packet_name(target)
    return (
        flop_registry.get(packet)
        or flop_registry.get(_SAME_FLOPS.get(name))
        or _OWN_FORMULAS.get(name)
    )


def matmul_flops(call: OpSignature) -> int:
    """The operations that a formula for the operator says, PyTorch's if any; 0 without one.

    >>> x = Layout((4, 8), (8, 1), torch.float32)
    >>> w = Layout((8, 2), (2, 1), torch.float32)
    >>> y = Layout((4, 2), (2, 1), torch.float32)
    >>> matmul_flops(OpSignature(aten.mm.default, (Place(0), Place(1)), (), (x, w), y))
    128
    """
    formula = _formula_of(call.target)
    if formula is None:
        return 0
    # formulas in terms of shapes are wrapped by one that takes tensors and leaves shapes alone
    stand_in = _shape_of if hasattr(formula, "__wrapped__") else _meta_tensor
    try:
        inputs = [stand_in(layout) for layout in call.inputs]
        args = [_with_inputs(a, inputs) for a in call.args]
        kwargs = {name: _with_inputs(a, inputs) for name, a in call.kwargs}
        output = call.output
        out = tuple(map(stand_in, output)) if type(output) is tuple else stand_in(output)
        return max(0, int(formula(*args, **kwargs, out_val=out)))
    except Exception:  # a formula of a user's, or of kernels with other arguments
        _logger.debug("the formula for the flops of %s failed", call.target, exc_info=True)
        return 0


def _shape_of(layout: Layout | None) -> Any:
    return None if layout is None else layout.shape


def _meta_tensor(layout: Layout | None) -> Any:
    if layout is None:
        return None
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def _with_inputs(value: Any, inputs: list[Any]) -> Any:
    if isinstance(value, Place):
        return inputs[value.index]
    if type(value) is tuple:
        return [_with_inputs(v, inputs) for v in value]
    return value


# Additions that take as long, for each element of the largest tensor, on a CPU (in its cache,
# AVX-512, PyTorch 2.13); a GPU is bound by its memory in all of them.
# fmt: off
_FLOPS_PER_ELEMENT = {f"aten.{name}": count for count, names in {
    3: "sqrt rsqrt native_layer_norm_backward _softmax_backward_data tanh_backward mean hardswish "
       "elu",
    5: "sigmoid silu silu_backward native_layer_norm _log_softmax_backward_data "
       "native_group_norm _fused_rms_norm",
    8: "_softmax _log_softmax where masked_fill constant_pad_nd gelu all any _adaptive_avg_pool2d",
    10: "exp log log2 log10 log1p exp2 expm1 logsumexp softplus cumsum gather "
        "max_pool2d_with_indices_backward",
    15: "sin cos erf erfc tan asin acos atan atan2 sinh cosh gelu_backward native_batch_norm "
        "_native_batch_norm_legit _native_batch_norm_legit_functional avg_pool2d argmax argmin "
        "_fft_r2c _fft_c2c _fft_c2r",
    25: "tanh pow lgamma digamma erfinv igamma mish upsample_nearest2d grid_sampler_2d",
    35: "rand rand_like uniform randn randn_like normal normal_functional exponential randint",
    60: "bernoulli native_dropout multinomial cumprod",
    100: "max_pool2d_with_indices upsample_bilinear2d scatter scatter_add index_put polar "
         "var_mean var std std_mean",
    400: "sort topk argsort unique _unique2 kthvalue median mode randperm",
}.items() for name in names.split()} | {
    "torchremat.loss_gradient": 7,
    "torchremat.encode_at_most": 2,
    "torchremat.drop_gradient": 4,
    "torchremat.functional_cudnn_batch_norm": 15,
    "torchremat.functional_miopen_batch_norm": 15,
}
# fmt: on


def _pointwise_flops(call: OpSignature, name: str, touched: list[Layout]) -> int:
    """The operations of `call` besides matrix products, in additions."""
    if name in _ALLOCATIONS:
        return 0
    if is_factorisation(call.target):
        # of n^3 for n x n, to a factor of two on matrices of 128 to 512
        rounds = 10 if "svd" in name or "eig" in name else 2
        return rounds * max(
            layout.num_elements * min(layout.shape[-2:], default=1) for layout in touched
        )
    count = _FLOPS_PER_ELEMENT.get(name.removesuffix("_"), 1)
    if name == "aten.pow" and call.args[1] in (2, 3, 0.5, -1, -2):  # kernels of their own
        count = 1
    return count * max(layout.num_elements for layout in touched)


# they give memory with nothing in it
_ALLOCATIONS = frozenset(
    f"aten.{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    )
)  # fmt: skip

# they read nothing of a tensor but its shape, dtype and device
_READ_NO_DATA = _ALLOCATIONS | frozenset(
    f"aten.{name}"
    for name in (
        "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_",
        "fill_", "uniform_", "normal_", "exponential_", "random_", "bernoulli_", "resize_",
    )
)  # fmt: skip

# of their first tensor they read no more than they write, or have indices for
_GATHERS = frozenset(
    f"aten.{name}"
    for name in (
        "embedding", "index", "index_select", "gather", "take", "_unsafe_index", "select_copy",
        "slice_copy", "embedding_renorm_", "nll_loss_forward", "nll_loss2d_forward",
    )
)  # fmt: skip

# what was in their first tensor is lost unread
_OVERWRITE = frozenset({"aten.copy_", "aten.copy"})


def _reads(call: OpSignature, name: str, written: int) -> list[int]:
    if name in _READ_NO_DATA or draws_by_shape(call.target):
        return [0] * len(call.inputs)
    reads = [_nbytes(layout) for layout in call.inputs]
    if not reads:
        return reads
    if name in _GATHERS:
        reads[0] = min(reads[0], max(written, sum(reads[1:])))
    if name in _OVERWRITE:
        reads[0] = 0
    for index in _out_arguments(call):
        reads[index] = 0
    return reads


def _nbytes(layout: Any) -> int:
    if isinstance(layout, Layout):
        return layout.nbytes
    return sum(map(_nbytes, layout)) if type(layout) is tuple else 0


def _find_written_inputs(call: OpSignature) -> list[Layout]:
    """The inputs that `call` writes to, of an operator that has no outputs besides."""
    if (
        not isinstance(call.target, _torch.OpOverload)
        or not _torch.schema_of(call.target).is_mutable
    ):
        return []
    names = {a.name for a in _torch.schema_arguments(call.target) if _is_written(a)}
    positions = [i for i, a in enumerate(_torch.schema_arguments(call.target)) if a.name in names]
    values = [call.args[i] for i in positions if i < len(call.args)]
    values += [value for name, value in call.kwargs if name in names]
    layouts = [call.inputs[i] for value in values for i in _places_in(value)]
    return [layout for layout in layouts if isinstance(layout, Layout)]


def _out_arguments(call: OpSignature) -> list[int]:
    """The positions of the inputs that are given only to be written: `out=`."""
    if not call.kwargs or not isinstance(call.target, _torch.OpOverload):
        return []
    arguments = _torch.schema_arguments(call.target)
    names = {a.name for a in arguments if a.kwarg_only and _is_written(a)}
    return [i for name, value in call.kwargs if name in names for i in _places_in(value)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _places_in(value: Any) -> list[int]:
    if isinstance(value, Place):
        return [value.index]
    return [i for v in value for i in _places_in(v)] if type(value) is tuple else []

"""Attention within the segments of concatenated sequences, without padding.

    q, k, v    a b c d e f      out[a], out[b]      from the keys and values of a, b
    offsets    0 2 2 6          out[c] ... out[f]   from those of c, d, e, f

On a CPU and, for halves, on a GPU it runs PyTorch's flash attention, forward and backward;
elsewhere the plain formula, segment by segment. Operator: `torch.ops.torchremat.ragged_attention`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchremat.errors import SegmentError, SegmentTypeError
from torchremat.kernels.attention import attention_ops

__all__ = ["ragged_attention"]


def __dir__() -> list[str]:
    return sorted(__all__)


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Scaled-dot-product attention of each query to the keys of its own segment.

        out[i] = sum over j of softmax_j(scale q[i] . k[j]) v[j],   j in the segment of i

    Args:
        q: `[total_q, heads, dim]`, of a floating dtype, with any strides.
        k: `[total_k, kv_heads, dim]`; `kv_heads` divides `heads`, and each head of keys serves
            `heads // kv_heads` heads of queries that follow one another.
        v: `[total_k, kv_heads, dim_v]`.
        offsets_q: `[num_segments + 1]` integers that do not decrease, from 0 to `total_q`. Rows
            before the first and from the last on belong to no segment.
        offsets_k: likewise for keys and values, with as many segments; as `offsets_q` if not given.
        is_causal: whether the query in place n of its segment sees the keys in places 0 to n alone.
        scale: a number instead of `dim ** -0.5`.

    Returns:
        `[total_q, heads, dim_v]` of the dtype of `q`; 0 for queries without keys. What a segment
        gives is the same, on a CPU to the bit, whatever other segments there are.

    Raises:
        SegmentError: for shapes that do not fit, and for offsets that decrease or leave the rows.
        SegmentTypeError: for what is not a tensor, and for dtypes that are not floating or differ.

    `torch.nn.functional.scaled_dot_product_attention` for each segment, with its `is_causal`, and
    `torch.nn.attention.varlen.varlen_attn` with derivatives of every kind and order. The offsets
    are read: on a GPU a call waits for it.

    >>> q = torch.zeros(4, 1, 2)
    >>> v = torch.tensor([1.0, 3.0, 5.0, 7.0]).reshape(4, 1, 1)
    >>> ragged_attention(q, q, v, torch.tensor([0, 2, 4])).flatten()
    tensor([2., 2., 6., 6.])
    >>> ragged_attention(q, q, v, torch.tensor([0, 2, 4]), is_causal=True).flatten()
    tensor([1., 2., 5., 6.])
    """
    _check_tensors(q=q, k=k, v=v, offsets_q=offsets_q, offsets_k=offsets_k)
    _check_shapes(q, k, v)
    cuts_q = _as_cuts("offsets_q", offsets_q, q)
    cuts_k = cuts_q if offsets_k is None else _as_cuts("offsets_k", offsets_k, q)
    if cuts_q.shape != cuts_k.shape:
        raise SegmentError(
            f"ragged_attention is given {cuts_q.shape[0]} offsets_q and {cuts_k.shape[0]} "
            "offsets_k: each segment of queries needs one of keys, which may be empty"
        )
    factor = max(int(q.shape[2]), 1) ** -0.5 if scale is None else float(scale)
    out, _ = attention_ops.OPS["ragged_attention"](q, k, v, cuts_q, cuts_k, bool(is_causal), factor)
    return out  # type: ignore[no-any-return]


def _check_tensors(**values: Tensor | None) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor) and not (name == "offsets_k" and value is None):
            raise SegmentTypeError(
                f"ragged_attention takes {name} that is a tensor, and is given "
                f"{type(value).__name__}"
            )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    given = {"q": q, "k": k, "v": v}
    dtypes = {name: str(x.dtype) for name, x in given.items()}
    if not q.is_floating_point() or len(set(dtypes.values())) > 1:
        raise SegmentTypeError(
            "ragged_attention takes q, k and v of one floating dtype, and is given "
            f"{_describe_shapes(dtypes)}"
        )
    devices = {name: str(x.device) for name, x in given.items()}
    if len(set(devices.values())) > 1:
        raise SegmentError(
            f"ragged_attention is given {_describe_shapes(devices)}: move them to one device"
        )
    shapes = _describe_shapes({name: list(x.shape) for name, x in given.items()})
    if {x.dim() for x in given.values()} != {3}:
        raise SegmentError(
            "ragged_attention takes q [total_q, heads, dim], k [total_k, kv_heads, dim] and "
            f"v [total_k, kv_heads, dim_v], and is given {shapes}"
        )
    if q.shape[2] != k.shape[2]:
        raise SegmentError(f"ragged_attention takes q and k of one dim, and is given {shapes}")
    if k.shape[:2] != v.shape[:2]:
        raise SegmentError(f"ragged_attention takes a value for each key, and is given {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise SegmentError(
            "ragged_attention takes as many heads of queries as of keys, or a multiple of them, "
            f"and is given {shapes}"
        )


def _as_cuts(name: str, offsets: Tensor, q: Tensor) -> Tensor:
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise SegmentTypeError(
            f"ragged_attention takes {name} of an integer dtype, not {offsets.dtype}"
        )
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise SegmentError(
            f"ragged_attention takes {name} [num_segments + 1], at least [0], and is given shape "
            f"{list(offsets.shape)}"
        )
    if offsets.device != q.device:
        raise SegmentError(
            f"ragged_attention is given q on {q.device} and {name} on {offsets.device}: "
            f"move one, as with {name}.to(q.device)"
        )
    return offsets.to(torch.int64)


def _describe_shapes(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())

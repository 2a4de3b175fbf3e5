"""Operators that keep a value for the backward pass in fewer bits, and that give it back.

    encode_bits(mask)             a bit for each entry of a mask
    encode_at_most(x, 0.0)        a bit for each entry of x: whether it is at most 0
    decode_bits(bits, shape)      the mask
    drop_gradient(dy, bits, dims) dy, but 0 where the bit is 1; bits are of the dims in this order
    encode_indices(i, int16)      integers of fewer bits, which hold every index
    encode_shape(x)               one entry, of which `decode_shape` makes a tensor with no values

Eight entries of a mask are the bytes b0 to b7 of one word, each 0 or 1. Its product with the sum of
2^(56 - 7k), k from 0 to 7, has b_k at bit 56 + k. Proof: the product is the sum of b_i 2^(56 + 8i -
7k) over i and k. Of these numbers none is another's, as 8(i - j) = 7(k - l) asks for i - j = 7 and
k - l = 8, so that nothing is carried. For i = k they are the bits from 56 to 63. For i > k the
exponent is 64 or more, beyond the word; for i < k it is below 56.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from torchremat import _torch

aten = torch.ops.aten

_SPREAD = sum(1 << (56 - 7 * k) for k in range(8))
# Entries that are packed at a time, by the kind of device: of 2^16 to 2^20 the fastest on a CPU.
# Their masks are the workspace of a kernel, which no count of live bytes has.
_CHUNKS = {"cpu": 1 << 17}
# On others a launch takes as long as millions of entries. Chosen by hand.
_CHUNK = 1 << 24

_library = torch.library.Library("torchremat", "FRAGMENT")
_library.define("encode_bits(Tensor mask) -> Tensor")
_library.define("encode_at_most(Tensor x, float most) -> Tensor")
_library.define("decode_bits(Tensor bits, SymInt[] shape) -> Tensor")
_library.define("drop_gradient(Tensor slope, Tensor bits, int[] order) -> Tensor")
_library.define("encode_indices(Tensor indices, ScalarType dtype) -> Tensor")
_library.define("encode_shape(Tensor x) -> Tensor")
_library.define("decode_shape(Tensor code, SymInt[] shape, SymInt[] strides) -> Tensor")
encode_bits = torch.ops.torchremat.encode_bits.default
encode_at_most = torch.ops.torchremat.encode_at_most.default
decode_bits = torch.ops.torchremat.decode_bits.default
drop_gradient = torch.ops.torchremat.drop_gradient.default
encode_indices = torch.ops.torchremat.encode_indices.default
encode_shape = torch.ops.torchremat.encode_shape.default
decode_shape = torch.ops.torchremat.decode_shape.default

_EXACT = frozenset({encode_bits, encode_indices})
_ENCODERS = _EXACT | {encode_at_most, encode_shape}


def is_encoding(node: fx.Node) -> bool:
    """Whether `node` is a value of the forward pass in fewer bits."""
    return node.target in _ENCODERS


def is_exact_encoding(node: fx.Node) -> bool:
    """Whether `node` is a value of the forward pass in fewer bits, which give back all of it."""
    return node.target in _EXACT


def _encode_bits(mask: Tensor) -> Tensor:
    return _pack(mask, lambda part, out: out.copy_(part))


def _encode_at_most(x: Tensor, most: float) -> Tensor:
    return _pack(x, lambda part, out: torch.le(part, most, out=out))


def _pack(values: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    flat = values.reshape(-1)
    count = len(flat)
    bits = flat.new_empty(math.ceil(count / 8), dtype=torch.uint8)
    chunk = _CHUNKS.get(flat.device.type, _CHUNK)
    memory = flat.new_empty(min(chunk, 8 * len(bits)), dtype=torch.bool)
    for start in range(0, count, chunk):
        part = flat[start : start + chunk]
        mask = memory[: 8 * math.ceil(len(part) / 8)]
        mask[len(part) :] = False
        compare(part, mask[: len(part)])
        words = mask.view(torch.int64).mul_(_SPREAD).bitwise_right_shift_(56)
        bits[start // 8 : start // 8 + len(words)] = words
    return bits


def _decode_bits(bits: Tensor, shape: Sequence[int]) -> Tensor:
    places = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    found = bits.new_empty(math.prod(shape))
    _unpack(bits, places, found)
    return found.ne_(0).view(torch.bool).view(shape)


def _unpack(bits: Tensor, places: Tensor, out: Tensor) -> None:
    """Fill `out` with numbers that are 0 where a bit is."""
    whole = len(out) // 8
    torch.bitwise_and(bits[:whole, None], places, out=out[: 8 * whole].view(whole, 8))
    if rest := len(out) - 8 * whole:
        out[8 * whole :] = bits[whole:] & places[:rest]


def _drop_gradient(slope: Tensor, bits: Tensor, order: Sequence[int]) -> Tensor:
    lying = slope.permute(*order)
    flat = lying.reshape(-1)
    found = torch.empty_like(flat)
    places = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_vectorised = slope.device.type == "cpu"  # there `masked_fill_` takes three times as long
    chunk = _CHUNKS.get(slope.device.type, _CHUNK)
    is_dropped = bits.new_empty(min(chunk, len(flat)))
    stand_in = found.new_empty(len(is_dropped) if is_vectorised else 0)
    for start in range(0, len(flat), chunk):
        part, into = flat[start : start + chunk], found[start : start + chunk]
        mask = is_dropped[: len(part)]
        _unpack(bits[start // 8 :], places, mask)
        if is_vectorised:
            values = stand_in[: len(part)].copy_(mask.eq_(0))
            aten.threshold_backward.grad_input(part, values, 0, grad_input=into)
        else:
            drop_by_filling(part, mask, into)
    return found.view(lying.shape).permute(*_invert(order))


def drop_by_filling(slope: Tensor, is_dropped: Tensor, out: Tensor) -> None:
    """Fill `out` with `slope`, and with 0 where the integers `is_dropped`, which change, are not 0.

    It is for devices where this is as fast as the memory.
    """
    out.copy_(slope).masked_fill_(is_dropped.ne_(0).view(torch.bool), 0)


def _drop_plainly(slope: Tensor, bits: Tensor, order: Sequence[int]) -> Tensor:
    """Drop it by operators that have derivatives and batches."""
    lying = slope.permute(*order)
    return torch.where(decode_bits(bits, lying.shape), 0, lying).permute(*_invert(order))


def _invert(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def _encode_indices(indices: Tensor, dtype: torch.dtype) -> Tensor:
    return indices.to(dtype)


def _encode_shape(x: Tensor) -> Tensor:
    return x.new_zeros([1] * x.dim())


def _decode_shape(code: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    return code.new_empty_strided(shape, strides)


def _shape_bits(values: Tensor, *_: object) -> Tensor:
    return values.new_empty((values.numel() + 7) // 8, dtype=torch.uint8)


def _shape_mask(bits: Tensor, shape: Sequence[int]) -> Tensor:
    return bits.new_empty(shape, dtype=torch.bool)


def _pack_each(mask: Tensor) -> Tensor:
    """Encode a mask by operators that `vmap` can batch."""
    flat = mask.reshape(-1).to(torch.uint8)
    words = nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    places = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (words * places).sum(1, dtype=torch.uint8)


def _unpack_each(bits: Tensor, shape: Sequence[int]) -> Tensor:
    places = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] & places).ne(0).reshape(-1)[: math.prod(shape)].view(shape)


def _shape_gradient(slope: Tensor, bits: Tensor, order: Sequence[int]) -> Tensor:
    lying = slope.permute(*order)
    return lying.new_empty(lying.shape).permute(*_invert(order))


def _drop_with_derivatives(slope: Tensor, bits: Tensor, order: Sequence[int]) -> Tensor:
    is_recorded = torch.is_grad_enabled() and slope.requires_grad
    if is_recorded or _torch.in_dual_level() or _torch.functorch_is_active():
        return _drop_plainly(slope, bits, order)
    with _torch.below_autograd():
        found: Tensor = drop_gradient(slope, bits, order)
    return found


def _without_autograd(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: object) -> Tensor:
        with _torch.below_autograd():
            return operator(*args)

    return run


for _name, _kernel, _shape, _for_each, _recorded in (
    ("encode_bits", _encode_bits, _shape_bits, _pack_each, None),
    ("encode_at_most", _encode_at_most, _shape_bits, lambda x, most: _pack_each(x <= most), None),
    ("decode_bits", _decode_bits, _shape_mask, _unpack_each, None),
    ("drop_gradient", _drop_gradient, _shape_gradient, _drop_plainly, _drop_with_derivatives),
    ("encode_indices", _encode_indices, _encode_indices, _encode_indices, None),
    ("encode_shape", _encode_shape, _encode_shape, _encode_shape, None),
    ("decode_shape", _decode_shape, _decode_shape, _decode_shape, None),
):
    _operator = getattr(torch.ops.torchremat, _name).default
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")
    _library.impl(_name, _for_each, "FuncTorchBatched")
    _library.impl(_name, _recorded or _without_autograd(_operator), "Autograd")

"""Attention over segments: the segments of like lengths taken together, and the plain formula.

    lengths of queries  2 0 5 2        chunks: {2 x 3: segments 0 and 3}, {5 x 1: segment 2}
    lengths of keys     3 4 1 3        an empty segment gives nothing, and is in none

Nothing is padded: a chunk holds segments of exactly the same lengths, so that what a segment gives
does not depend on the others, to the bit. Long segments are chunks by themselves, which are views.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchremat import _torch

MANY_PAIRS = 2**12
"""A chunk of several segments has at most so many pairs of a query and a key.

One call for 8 heads of 64 numbers takes 10 us and 5 ns a pair on a core: more would save nothing.
"""


@dataclass(frozen=True)
class Chunk:
    num: int
    lengths: tuple[int, int]
    rows: tuple[slice | Tensor, slice | Tensor]

    def take(self, x: Tensor, side: int) -> Tensor:
        """The rows of `x`, of queries (0) or keys (1), as `[num, length, ...]`."""
        rows = self.rows[side]
        taken = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
        shaped: Tensor = taken.unflatten(0, (self.num, self.lengths[side]))
        return shaped

    def put(self, x: Tensor, side: int, values: Tensor) -> None:
        rows = self.rows[side]
        if isinstance(rows, slice):
            x[rows].unflatten(0, (self.num, self.lengths[side])).copy_(values)
        else:
            x.index_copy_(0, rows, values.flatten(0, 1).to(x.dtype))


def chunks_of(
    offsets_q: Tensor, offsets_k: Tensor, device: torch.device | None = None
) -> Iterator[Chunk]:
    """The segments that have queries and keys, by their lengths. Reads the offsets.

    The rows of a chunk are on `device`, or where the offsets are.

    >>> offsets_q, offsets_k = torch.tensor([0, 2, 2, 7, 9]), torch.tensor([0, 3, 7, 8, 11])
    >>> [(chunk.num, chunk.lengths) for chunk in chunks_of(offsets_q, offsets_k)]
    [(2, (2, 3)), (1, (5, 1))]
    """
    device = device or offsets_q.device
    starts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    pairs = zip(offsets_q.tolist(), offsets_k.tolist(), strict=True)
    for (q, k), (q_end, k_end) in itertools.pairwise(pairs):
        if q_end > q and k_end > k:
            starts.setdefault((q_end - q, k_end - k), []).append((q, k))
    for lengths, found in starts.items():
        size = max(1, MANY_PAIRS // (lengths[0] * lengths[1]))
        for at in range(0, len(found), size):
            yield _chunk(found[at : at + size], lengths, device)


def _chunk(starts: list[tuple[int, int]], lengths: tuple[int, int], device: torch.device) -> Chunk:
    (q, k), (num_q, num_k) = starts[0], lengths
    if len(starts) == 1:
        return Chunk(1, lengths, (slice(q, q + num_q), slice(k, k + num_k)))
    firsts = torch.tensor(starts, device=device)
    rows_q, rows_k = (
        (firsts[:, side, None] + torch.arange(lengths[side], device=device)).flatten()
        for side in (0, 1)
    )
    return Chunk(len(starts), lengths, (rows_q, rows_k))


def has_cpu_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[2] == v.shape[2] and 0 not in q.shape[1:]


def forward_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, cuts: tuple[Tensor, Tensor], is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = empty_results(q, v)
    q, k, v = (_readable(x) for x in (q, k, v))
    for chunk in chunks_of(*cuts):
        queries, keys, values = (
            chunk.take(x, side).transpose(1, 2) for x, side in ((q, 0), (k, 1), (v, 1))
        )
        part, part_lse = _torch.flash_attention_on_cpu(
            queries, keys, values, 0.0, is_causal, scale=scale
        )
        chunk.put(out, 0, part.transpose(1, 2))
        chunk.put(lse, 0, part_lse.transpose(1, 2))
    return out, lse


def backward_on_cpu(
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor],
    cuts: tuple[Tensor, Tensor],
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [x.new_zeros(x.shape) for x in (q, k, v)]
    rows = [_readable(x) for x in (cotangent, q, k, v, results[0])]
    sides = (0, 0, 1, 1, 0)
    for chunk in chunks_of(*cuts):
        taken = [chunk.take(x, side).transpose(1, 2) for x, side in zip(rows, sides, strict=True)]
        lse = chunk.take(results[1], 0).transpose(1, 2)
        parts = _torch.flash_attention_on_cpu_backward(*taken, lse, 0.0, is_causal, scale=scale)
        for grad, side, part in zip(grads, (0, 1, 1), parts, strict=True):
            chunk.put(grad, side, part.transpose(1, 2))
    return grads[0], grads[1], grads[2]


def _readable(x: Tensor) -> Tensor:
    """`x` with numbers that lie side by side and rows that do not overlap, as BLAS wants them."""
    is_readable = x.stride(2) == 1 and min(x.stride()[:2]) >= x.shape[2]
    return x if is_readable else x.contiguous()


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1])
    lse = q.new_full(shape, -torch.inf, dtype=dtype_of_logsumexp(q.dtype))
    return q.new_zeros((*shape, v.shape[2])), lse


def dtype_of_logsumexp(dtype: torch.dtype) -> torch.dtype:
    """The logsumexp of halves is in float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


Formula = Callable[..., tuple[Tensor, ...]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of segments `[num, length, heads, dim]`, by the formula.

    >>> q, k = torch.ones(1, 2, 1, 1), torch.zeros(1, 2, 1, 1)
    >>> v = torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> attend(q, k, v, is_causal=True, scale=1.0)[0].flatten()
    tensor([1., 2.])
    """
    dtype = dtype_of_logsumexp(q.dtype)
    kv_heads = k.shape[2]
    groups = q.shape[2] // kv_heads if kv_heads else 0
    grouped = q.to(dtype).unflatten(2, (kv_heads, groups))
    scores = torch.einsum("nqhgd,nkhd->nhgqk", grouped, k.to(dtype)) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("nhgqk,nkhe->nqhge", weights, v.to(dtype)).flatten(2, 3)
    return out.to(q.dtype), lse.flatten(1, 2).transpose(1, 2)


SIDES = {"q": 0, "k": 1, "v": 1, "o": 0, "l": 0}
"""Whose rows queries, keys, values, outputs and logsumexps have: of queries (0) or keys (1)."""


def signature_of(program: str) -> tuple[str, str]:
    """The arguments and results of a derivative, in the letters of `SIDES`.

    Each letter of `program` transforms the function of the letters before it:

        "r"     (arguments, cotangents of results) -> cotangents of arguments
        "f"     (arguments, tangents of arguments) -> tangents of results

    >>> signature_of(""), signature_of("r"), signature_of("rf")
    (('qkv', 'ol'), ('qkvol', 'qkv'), ('qkvolqkvol', 'qkv'))
    """
    takes, gives = "qkv", "ol"
    for letter in program:
        takes, gives = (takes + gives, takes) if letter == "r" else (takes + takes, gives)
    return takes, gives


def run_program(
    program: str,
    tensors: Sequence[Tensor],
    cuts: tuple[Tensor, Tensor],
    is_causal: bool,
    scale: float,
) -> list[Tensor]:
    takes, gives = signature_of(program)
    results = empty_derivatives(program, tensors)
    if not program:
        results[1].fill_(-torch.inf)
    function = _derivative(program, partial(attend, is_causal=is_causal, scale=scale))
    with _torch.autograd_as_at_the_top():
        for chunk in chunks_of(*cuts, tensors[0].device):
            # forward mode writes to its tensors, which must not overlap themselves
            taken = [
                chunk.take(x, SIDES[c]).contiguous() for x, c in zip(tensors, takes, strict=True)
            ]
            for result, c, part in zip(results, gives, function(*taken), strict=True):
                chunk.put(result, SIDES[c], part)
    return results


def _derivative(program: str, function: Formula) -> Formula:
    if not program:
        return function
    inner, num = _derivative(program[:-1], function), len(signature_of(program[:-1])[0])
    if program[-1] == "r":
        return lambda *args: torch.func.vjp(inner, *args[:num])[1](args[num:])
    return lambda *args: torch.func.jvp(inner, args[:num], args[num:])[1]


def empty_derivatives(program: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    takes, gives = signature_of(program)
    models = dict(zip(takes, tensors, strict=False))
    if not {"o", "l"} <= models.keys():
        models["o"], models["l"] = empty_results(models["q"], models["v"])
    return [models[c].new_zeros(models[c].shape) for c in gives]

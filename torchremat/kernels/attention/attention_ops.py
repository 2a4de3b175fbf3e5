"""The operators behind `ragged_attention`: what runs where, derivatives, and rules for `vmap`.

    s_ij = scale q_i . k_j           p_ij = exp(s_ij - l_i)           o_i = sum of p_ij v_j
    dv_j = sum of p_ij do_i          ds_ij = p_ij (do_i . v_j - do_i . o_i + dl_i)
    dq_i = scale sum of ds_ij k_j    dk_j = scale sum of ds_ij q_i

`ragged_attention` gives o and l, `ragged_attention_backward` the cotangents for one of o alone:
both by the kernels that PyTorch has for the device. All else, forward mode, second and higher
orders and cotangents of l, is `ragged_attention_derivative`: the plain formula, differentiated as a
string of letters says, a chunk of segments at a time. It is slower, and its memory is that of the
scores of one chunk. Its derivatives are derivatives again, so that there are all orders.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.kernels.attention.attention_eager import (
    SIDES,
    backward_on_cpu,
    empty_derivatives,
    empty_results,
    forward_on_cpu,
    has_cpu_kernel,
    run_program,
    signature_of,
)
from torchremat.kernels.attention.attention_flash import (
    backward_by_flash,
    forward_by_flash,
    has_flash_kernel,
)
from torchremat.kernels.segments.segments_eager import check_offsets

Cuts = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    cuts = _check_cuts(offsets_q, offsets_k, q, k)
    if has_cpu_kernel(q, v):
        return forward_on_cpu(q, k, v, cuts, is_causal, scale)
    if has_flash_kernel(q, v, cuts, is_causal):
        return forward_by_flash(q, k, v, cuts, is_causal, scale)
    out, lse = run_program("", (q, k, v), cuts, is_causal, scale)
    return out, lse


def _backward(  # noqa: PLR0913, PLR0917 (the schema of the operator)
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    is_causal: bool,
    scale: float,
) -> Triple:
    cuts = _check_cuts(offsets_q, offsets_k, q, k)
    if has_cpu_kernel(q, v):
        return backward_on_cpu(cotangent, q, k, v, (out, lse), cuts, is_causal, scale)
    if has_flash_kernel(q, v, cuts, is_causal):
        return backward_by_flash(cotangent, q, k, v, (out, lse), cuts, is_causal, scale)
    tensors = (q, k, v, cotangent, torch.zeros_like(lse))
    dq, dk, dv = run_program("r", tensors, cuts, is_causal, scale)
    return dq, dk, dv


def _derivative(
    tensors: Sequence[Tensor],
    program: str,
    offsets_q: Tensor,
    offsets_k: Tensor,
    is_causal: bool,
    scale: float,
) -> list[Tensor]:
    cuts = _check_cuts(offsets_q, offsets_k, *tensors[:2])
    return run_program(program, tensors, cuts, is_causal, scale)


def _check_cuts(offsets_q: Tensor, offsets_k: Tensor, q: Tensor, k: Tensor) -> Cuts:
    on_cpu = offsets_q.cpu()
    cuts = (on_cpu, on_cpu if offsets_k is offsets_q else offsets_k.cpu())
    for offsets, rows in zip(cuts, (q, k), strict=True):
        check_offsets(offsets, rows.shape[0])
    return cuts


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)


def _fake_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> Triple:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_derivative(tensors: Sequence[Tensor], program: str, *_: Any) -> list[Tensor]:
    return empty_derivatives(program, tensors)


def _batching_rule(name: str, sides: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        num = len(sides)
        mapped, (results_dim, unfold) = _fold(
            info.batch_size, args[:num], in_dims[:num], sides, args[num : num + 2], in_dims[num:]
        )
        results = OPS[name](*mapped[0], *mapped[1], *args[num + 2 :])
        return tuple(unfold(r) for r in results), (results_dim,) * len(results)

    return rule


def _batch_derivative(
    info: Any, in_dims: Any, tensors: Sequence[Tensor], program: str, *args: Any
) -> Any:
    (folded, cuts), (results_dim, unfold) = _fold(
        info.batch_size, tensors, in_dims[0], signature_of(program)[0], args[:2], in_dims[2:]
    )
    results = OPS["ragged_attention_derivative"](folded, program, *cuts, *args[2:])
    return [unfold(r) for r in results], [results_dim] * len(results)


def _fold(
    size: int, tensors: Sequence[Tensor], dims: Any, sides: str, cuts: Any, cuts_dims: Any
) -> Any:
    """Arguments with the batch among the heads or, if it has offsets of its own, among the rows."""
    if cuts_dims[0] is None and cuts_dims[1] is None:
        spread = [_with_batch(x, d, size, 1) for x, d in zip(tensors, dims, strict=True)]
        folded = [x.flatten(1, 2) for x in spread]
        return (folded, cuts), (1, lambda x: x.unflatten(1, (size, x.shape[1] // size)))
    rows = [_with_batch(x, d, size, 0) for x, d in zip(tensors, dims, strict=True)]
    totals = {SIDES[c]: x.shape[1] for c, x in zip(sides, rows, strict=True)}
    offsets = [_with_batch(x, d, size, 0) for x, d in zip(cuts, cuts_dims[:2], strict=True)]
    joined = _join_cuts(offsets[0], offsets[1], totals[0], totals[1])
    folded = [x.flatten(0, 1) for x in rows]
    return (folded, joined), (0, lambda x: x.unflatten(0, (size, x.shape[0] // size)))


def _with_batch(x: Tensor, dim: int | None, size: int, at: int) -> Tensor:
    if dim is not None:
        return x.movedim(dim, at)
    return x.unsqueeze(at).expand(*x.shape[:at], size, *x.shape[at:])


def _join_cuts(offsets_q: Tensor, offsets_k: Tensor, total_q: int, total_k: int) -> Cuts:
    """The offsets of all batches, end to end.

    After those of each are two segments for the rows that belong to none: one of queries without
    keys, and one of keys without queries. Offsets 0 1 and 1 2 for both, of 3 rows each:

        queries  0 1 4 4 5 5
        keys     0 1 1 4 5 5
    """
    shifts = torch.arange(offsets_q.shape[0], device=offsets_q.device)[:, None]
    q, k = offsets_q + total_q * shifts, offsets_k + total_k * shifts
    next_q = torch.cat([q[1:, :1], q[-1:, -1:]])
    return torch.cat([q, next_q], 1).flatten(), torch.cat([k, k[:, -1:]], 1).flatten()


def _differentiate(program: str, tensors: Sequence[Tensor], rest: Sequence[Any]) -> list[Tensor]:
    return OPS["ragged_attention_derivative"](list(tensors), program, *rest)  # type: ignore[no-any-return]


def _or_zeros(tangents: Sequence[Tensor | None], models: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, models, strict=True)]


class _RaggedAttention(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, *args: Any) -> Any:
        return run(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, q, k, v, offsets_q, offsets_k, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, offsets_q, offsets_k)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, of_lse: Tensor | None) -> Any:
        q, k, v, out, lse, *offsets = ctx.saved_tensors
        nothing = (None,) * 4
        if of_lse is not None:
            cotangents = _or_zeros((cotangent, of_lse), (out, lse))
            return (
                None,
                *_differentiate("r", (q, k, v, *cotangents), (*offsets, *ctx.options)),
                *nothing,
            )
        if cotangent is None:
            return (None,) * 8
        backward = OPS["ragged_attention_backward"]
        return None, *backward(cotangent, q, k, v, out, lse, *offsets, *ctx.options), *nothing


def _push_attention(args: list[Any], tangents: list[Tensor | None]) -> list[Tensor]:
    return _differentiate("f", (*args[:3], *_or_zeros(tangents[:3], args[:3])), args[3:])


class _Backward(torch.autograd.Function):
    """Of a cotangent, q, k and v alone: output and logsumexp are functions of them."""

    @staticmethod
    def forward(run: Any, *args: Any) -> Any:
        return run(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, cotangent, q, k, v, _, lse, offsets_q, offsets_k, *ctx.options = inputs
        ctx.save_for_backward(cotangent, q, k, v, lse, offsets_q, offsets_k)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        cotangent, q, k, v, lse, *offsets = ctx.saved_tensors
        tensors = (q, k, v, cotangent, torch.zeros_like(lse), *cotangents)
        *grads, grad, _ = _differentiate("rr", tensors, (*offsets, *ctx.options))
        return None, grad, *grads, *(None,) * 6


def _push_backward(args: list[Any], tangents: list[Tensor | None]) -> list[Tensor]:
    cotangent, q, k, v, _, lse, *rest = args
    primals = (q, k, v, cotangent, torch.zeros_like(lse))
    pushed = _or_zeros((*tangents[1:4], tangents[0], None), primals)
    return _differentiate("rf", (*primals, *pushed), rest)


class _AttentionDerivative(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, *args: Any) -> Any:
        return run(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *tensors, ctx.program, offsets_q, offsets_k, is_causal, scale = inputs
        ctx.options = (is_causal, scale)
        ctx.save_for_backward(*tensors, offsets_q, offsets_k)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        *tensors, offsets_q, offsets_k = ctx.saved_tensors
        rest = (offsets_q, offsets_k, *ctx.options)
        return None, *_differentiate(ctx.program + "r", (*tensors, *cotangents), rest), *(None,) * 5


def _push_derivative(args: list[Any], tangents: list[Tensor | None]) -> list[Tensor]:
    *tensors, program, offsets_q, offsets_k, is_causal, scale = args
    pushed = _or_zeros(tangents[: len(tensors)], tensors)
    return _differentiate(
        program + "f", (*tensors, *pushed), (offsets_q, offsets_k, is_causal, scale)
    )


OPS: dict[str, Any] = {}
"""The operators by name."""


def _define(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    batched: Callable[..., Any],
    function: type[torch.autograd.Function],
    push: Callable[..., Any],
) -> None:
    definition = torch.library.custom_op(f"torchremat::{name}", run, mutates_args=())
    definition.register_fake(fake)
    definition.register_vmap(batched)
    OPS[name] = getattr(torch.ops.torchremat, name).default
    _torch.register_function(OPS[name], function, push)


_define(
    "ragged_attention", _forward, _fake_forward, _batching_rule("ragged_attention", "qkv"),
    _RaggedAttention, _push_attention,
)  # fmt: skip
_define(
    "ragged_attention_backward", _backward, _fake_backward,
    _batching_rule("ragged_attention_backward", "oqkvol"), _Backward, _push_backward,
)  # fmt: skip
_define(
    "ragged_attention_derivative", _derivative, _fake_derivative, _batch_derivative,
    _AttentionDerivative, _push_derivative,
)  # fmt: skip

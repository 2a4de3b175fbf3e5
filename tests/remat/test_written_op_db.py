"""PyTorch's samples of operators with `out=`, into parts of buffers: no more memory than plain."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import ConcretizationError, EffectError, EffectWarning
from torchremat.measure import LiveBytes

pytest.importorskip("expecttest", reason="PyTorch's own tests need it")
from tests.op_samples import op_db

NUM_SAMPLES = 3
POLICIES = ("none", "full", "dots")

OPS = {
    ".".join(part for part in (op.name, op.variant_test_name) if part): op
    for op in op_db
    if op.supports_out and torch.float32 in op.supported_dtypes("cpu")
}


class MoreMemory(Exception):
    """A step takes more memory than in plain PyTorch."""


# In the graph they are other operators than the one with `out=`, whose results are copied there.
_TAKEN_APART = """
    eye fft.ifft fft.ihfft full kron linalg.cholesky linalg.eigvals linalg.eigvalsh linalg.inv
    linalg.ldl_factor linalg.lu_factor linalg.multi_dot linalg.solve linalg.solve_ex linspace
    log_softmax msort nn.functional.linear nn.functional.logsigmoid normal.number_mean ones
    softmax split_with_sizes_copy svd unbind_copy zeros
"""
# How long the result is, or what is refused, depends on values.
_READS_VALUES = "linalg.lstsq masked_select nonzero"
BROKEN: dict[str, type[BaseException]] = {
    **dict.fromkeys(_TAKEN_APART.split(), MoreMemory),
    **dict.fromkeys(_READS_VALUES.split(), ConcretizationError),
    "randn": EffectError,  # into what is not contiguous it draws in another order
    # it writes to other arguments too
    "_native_batch_norm_legit": EffectError,
}

Step = Callable[..., Tensor]


def calls(name: str, count: int) -> Iterator[tuple[Callable[..., Any], list[Tensor], Any]]:
    """Samples of the operator: as functions of tensors and `out`; their tensors and results."""
    op = OPS[name]
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", torch.float32))[:60]
    for sample in found[:: max(len(found) // count, 1)][:count]:
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def call(*given: Tensor, leaves=leaves, spec=spec, **out: Any) -> Any:
            left = iter(given)
            full = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            x, args, kwargs = pytree.tree_unflatten(full, spec)
            return op(x, *args, **kwargs, **out)

        yield call, tensors, call(*tensors)


def part_of(buffer: Tensor) -> Tensor:
    """The middle of a buffer that `buffer_around` makes: no part of it lies side by side."""
    return buffer[1, ..., 1:-1] if buffer.dim() > 1 else buffer[1]


def buffer_around(result: Tensor) -> Tensor:
    shape = result.shape
    return torch.zeros(3, *shape[:-1], *(n + 2 for n in shape[-1:]), dtype=result.dtype)


def as_out(results: Any, buffers: Sequence[Tensor]) -> Any:
    parts = tuple(map(part_of, buffers))
    return parts[0] if isinstance(results, Tensor) else parts


def steps_of(call: Callable[..., Any], results: Any) -> tuple[Step, Step]:
    """Steps that write results into parts of buffers, which they make or are given."""

    def given(weight: Tensor, tensors: list[Tensor], buffers: list[Tensor]) -> Tensor:
        with torch.no_grad():
            call(*tensors, out=as_out(results, buffers))
            total = weight.detach().sum()
            for buffer in buffers:
                total += buffer.to(total.dtype).sum()
        return weight.sin().sum() + total

    def made(weight: Tensor, tensors: list[Tensor], buffers: list[Tensor]) -> Tensor:
        return given(weight, tensors, [torch.zeros_like(b) for b in buffers])

    return given, made


def run(step: Step, tensors: list[Tensor], results: list[Tensor]) -> tuple[list[Any], int]:
    weight = torch.linspace(0, 1, 5).requires_grad_()
    for _ in range(2):
        buffers = [buffer_around(r) for r in results]
        copies = [t.clone() for t in tensors]
        weight.grad = None
        torch.manual_seed(1)
        with LiveBytes() as memory:
            y = step(weight, copies, buffers)
            y.backward()
    return [y.detach(), weight.grad, *buffers, *copies, torch.get_rng_state()], memory.peak


@contextmanager
def only_own_warnings() -> Iterator[None]:
    """Let warnings of samples and of PyTorch pass; those of effects are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", EffectWarning)
        yield


@only_own_warnings()
def compare(name: str, count: int) -> None:
    """Fail for other values than those of plain PyTorch, and then for more memory."""
    above = []
    for call, tensors, results in calls(name, count):
        leaves = [r for r in pytree.tree_leaves(results) if isinstance(r, Tensor)]
        for step in steps_of(call, results):
            try:
                expected, plain = run(step, tensors, leaves)
            except (RuntimeError, TypeError):
                continue  # it takes no such `out`
            for policy in (*POLICIES, f"budget:{plain}B"):
                try:
                    found, peak = run(tr.checkpoint(step, policy=policy), tensors, leaves)
                except tr.errors.BudgetError as error:
                    above.append(str(error))
                    continue
                assert_same(found, expected)
                if peak > plain:
                    above.append(f"{step.__name__} {policy}: {peak} of {plain} bytes")
    if above:
        raise MoreMemory(f"{name}: {above}")


EVERY_TWELFTH = list(OPS)[::12]


@pytest.mark.parametrize("name", [n for n in EVERY_TWELFTH if n not in BROKEN])
@pytest.mark.sampled(3)
def test_one_sample(name: str) -> None:
    compare(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_samples(name: str) -> None:
    error = BROKEN.get(name)
    with nullcontext() if error is None else pytest.raises(error):
        compare(name, NUM_SAMPLES)

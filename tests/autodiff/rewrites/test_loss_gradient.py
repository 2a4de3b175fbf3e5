"""Cross-entropy in checkpoints: the bits of PyTorch, with one tensor like the logits less."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchremat as tr
from tests.planning import llama
from torchremat.autodiff.rewrites import loss_gradient as loss_gradient_rule
from torchremat.autodiff.rewrites.loss_gradient_op import loss_gradient
from torchremat.measure import LiveBytes
from torchremat.planning.problem.orders import orders_of
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.solver import solve_orders
from torchremat.planning.step.traced_step import region_of

ROWS, CLASSES = 384, 1024
LOGITS_NBYTES = 4 * ROWS * CLASSES

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"label_smoothing": 0.1},
    {"weight": torch.rand(CLASSES)},
    {"weight": torch.rand(CLASSES), "label_smoothing": 0.2, "reduction": "none"},
]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    x, w = torch.randn(ROWS, 16), torch.randn(16, CLASSES)
    target = torch.randint(0, CLASSES, (ROWS,))
    target[::7] = -100
    return x.requires_grad_(), w.requires_grad_(), target


def loss_of(x: Tensor, w: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(x @ w, target, **options)


def gradients(function: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    wrt = [a for a in args if a.requires_grad]
    result = function(*args)
    return [result, *torch.autograd.grad(result.double().sum(), wrt)]


def targets_in(function: Callable[..., Any], *args: Any) -> list[Any]:
    return [node.target for node in region_of(function, args, {}).joint.module.graph.nodes]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def check_bits(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> None:
    expected = gradients(function, *args)
    found = gradients(tr.checkpoint(function, **options), *args)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(bits_of(a), bits_of(b))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "mean")
@pytest.mark.parametrize("policy", ["full", "dots", "everything_saveable"])
def test_bits_are_those_of_pytorch(options: dict[str, Any], policy: str) -> None:
    args = inputs()
    if options.get("ignore_index", -100) != -100:
        args[2].clamp_(min=0)
        args[2][::3] = options["ignore_index"]
    function = partial(loss_of, **options)
    assert loss_gradient in targets_in(function, *args)
    check_bits(function, *args, policy=policy)


def test_weights_smoothing_and_ignored_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of it, PyTorch's own too, add the weights in another order: compare with no rule."""
    x, w, target = inputs()
    function = partial(loss_of, weight=torch.rand(CLASSES), label_smoothing=0.2)
    found = gradients(tr.checkpoint(function, policy="full"), x, w, target)
    monkeypatch.setattr(loss_gradient_rule, "LEAST_NBYTES", 1 << 40)
    expected = gradients(tr.checkpoint(function, policy="full"), x, w, target)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(bits_of(a), bits_of(b))


@pytest.mark.parametrize("shape", [(24, 64, 512), (8, 64, 32, 32)])
def test_losses_of_sequences_and_images(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    for smoothing in (0.0, 0.1):
        function = partial(F.cross_entropy, label_smoothing=smoothing)
        assert loss_gradient in targets_in(function, x, target)
        check_bits(function, x, target, policy="full")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, 2 * CLASSES).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (ROWS,))
    assert loss_gradient in targets_in(F.cross_entropy, x, target)
    check_bits(F.cross_entropy, x, target, policy="full")


def test_autocast() -> None:
    def function(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(*args)

    args = inputs()
    check_bits(function, *args, policy="dots")


def test_dynamic_shapes() -> None:
    function = tr.checkpoint(loss_of, policy="full")
    x, w, target = inputs()
    for rows in (ROWS, 300, 299, 298, 17, 1):  # after a few sizes a trace has symbols
        args = (x.detach()[:rows].requires_grad_(), w, target[:rows].clamp(min=0))
        for a, b in zip(gradients(loss_of, *args), gradients(function, *args), strict=True):
            assert torch.equal(a, b)


def test_what_it_leaves_alone() -> None:
    x, w, target = inputs()
    soft = torch.rand(ROWS, CLASSES)
    assert loss_gradient not in targets_in(lambda x: F.cross_entropy(x @ w, soft), x)
    assert loss_gradient not in targets_in(lambda x: F.cross_entropy(x[:8] @ w, target[:8]), x)

    def read_twice(x: Tensor) -> Tensor:
        log_probs = F.log_softmax(x @ w, 1)
        return F.nll_loss(log_probs, target) + (x @ w).sum() + log_probs.square().sum()

    check_bits(read_twice, x, policy="full")


def test_derivatives_of_derivatives() -> None:
    x, w, target = inputs()
    v = torch.randn_like(x)

    def square(f: Callable[..., Tensor]) -> Tensor:
        (slope,) = torch.autograd.grad(f(x, w, target), x, create_graph=True)
        return torch.autograd.grad((slope * v).sum(), x)[0]

    function = tr.checkpoint(loss_of, policy="full")
    torch.testing.assert_close(square(function), square(loss_of))

    def pushed(f: Callable[..., Tensor]) -> Tensor:
        slope = torch.func.grad(lambda x: f(x, w.detach(), target))
        return torch.func.jvp(slope, (x.detach(),), (v,))[1]

    torch.testing.assert_close(pushed(function), pushed(loss_of))


def test_vmap_of_gradients() -> None:
    _, w, target = inputs()
    x = torch.randn(3, ROWS, 16)
    expected, found = (
        torch.vmap(torch.func.grad(lambda x, f=f: f(x, w.detach(), target)))(x)
        for f in (loss_of, tr.checkpoint(loss_of, policy="dots"))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compilers(backend: str) -> None:
    args = inputs()
    function = tr.jit(loss_of, policy="dots", backend=backend)
    for a, b in zip(gradients(loss_of, *args), gradients(function, *args), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4], OPTIONS[6]])
def test_one_tensor_less_is_alive(options: dict[str, Any]) -> None:
    args = inputs()
    function = partial(loss_of, **options)

    def peak_of(f: Callable[..., Tensor]) -> int:
        gradients(f, *args)
        with LiveBytes() as memory:
            gradients(f, *args)
        return memory.peak

    checkpointed = tr.checkpoint(function, policy="everything_saveable")
    simulated = tr.estimate(checkpointed, *args).peak_bytes
    assert simulated - 4096 <= peak_of(checkpointed) <= simulated + 64  # the sum outside
    assert peak_of(function) - peak_of(checkpointed) >= LOGITS_NBYTES - 4096  # vectors


def test_budgets_save_and_recompute_to_the_bit() -> None:
    def function(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).sin().sin().sin(), target)

    args = inputs()
    check_bits(function, *args, policy="budget:75%")
    plan = tr.plan(function, *args, budget="75%")
    assert plan.peak_bytes < 4.5 * LOGITS_NBYTES


def test_an_error_names_the_line_of_the_loss() -> None:
    with pytest.raises(tr.BudgetError, match=r"torchremat\.loss_gradient.*\(loss_of\)"):
        tr.plan(loss_of, *inputs(), budget="1MiB")


def test_a_llama_needs_two_tensors_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(llama, "NUM_TOKENS", 8192)
    problem = llama.llama_problem(4)
    least = solve_orders(orders_of(problem), 1, SolverOptions()).least_peak
    assert least < 7.9 * (1 << 30)  # 11.7 without the rule

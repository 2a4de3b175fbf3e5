"""`torchremat env --check`: the private parts of PyTorch, and what works without those it lacks."""

from collections.abc import Callable

import click
import torch

from torchremat import _torch, checkpoint_policies
from torchremat._torch.parts import all_parts, find_all_missing
from torchremat.batching.collectives.reduce import psum
from torchremat.batching.vmap import vmap
from torchremat.cli.terminal.output import show, write_json
from torchremat.compile.jit.jit import jit
from torchremat.core.formatting import table
from torchremat.derivatives.gradients import grad
from torchremat.nn.wrap import wrap
from torchremat.planning.api import plan
from torchremat.remat.checkpoint import checkpoint
from torchremat.remat.op.make_graph import make_graph
from torchremat.report.residuals import saved_residuals


def check_env(json_path: str | None) -> None:
    """Print what is missing and what works; exit with 1 if a feature fails."""
    missing = {name: part.without for name, part in find_all_missing(all_parts()).items()}
    missing |= dict.fromkeys(_torch.MISSING_PARTS, "") | missing
    results = {feature: _try(attempt) for feature, attempt in FEATURES.items()}
    if json_path != "-":
        show(_describe(missing, results))
    if json_path is not None:
        found = {"torch": torch.__version__, "missing": missing, "features": results}
        write_json(found, json_path)
    if any(result != "works" for result in results.values()):
        raise click.exceptions.Exit(1)


def _describe(missing: dict[str, str], results: dict[str, str]) -> str:
    newer = ", and newer than those" if _torch.is_newer() else ""
    count = sum(len(part.names) for part in all_parts())
    lines = [
        f"PyTorch {torch.__version__}; tested with {_torch.OLDEST} to {_torch.NEWEST}{newer}",
        "",
        f"private parts: {count}, of which {len(missing) or 'none'} missing",
        *table(sorted(missing.items()), numeric=()),
        "",
        "features:",
        *table(list(results.items()), numeric=()),
    ]
    return "\n".join(lines)


def _try(attempt: Callable[[], bool]) -> str:
    try:
        equals_plain = attempt()
    except Exception as error:  # of whatever kind: this tells it
        return f"fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "works" if equals_plain else "fails: the results are not those of plain PyTorch"


def _body(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ x.T).sin().sum()


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()


def _has_plain_gradient(fun: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    (found,) = torch.autograd.grad(fun(x := _input()), x)
    (plain,) = torch.autograd.grad(_body(y := _input()), y)
    return torch.equal(found, plain)


def _transform() -> bool:
    return torch.allclose(torch.func.grad(checkpoint(_body))(_input()), grad(_body)(_input()))


def _map() -> bool:
    rows = torch.ones(2, 3)
    found = vmap(lambda x: x / psum(x, "batch"), axis_name="batch")(rows)
    return torch.equal(found, torch.full((2, 3), 0.5))


def _call_function() -> bool:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, cotangent: torch.Tensor) -> torch.Tensor:
            return 3 * cotangent

    apply = Double.apply
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    checkpoint(lambda x: (apply(weight) * x).sum())(torch.ones_like(weight)).backward()  # type: ignore[no-untyped-call]
    return weight.grad is not None and weight.grad.tolist() == [3, 3, 3]


def _wrap() -> bool:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()
    x = _input().detach()
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    wrap(model, "full", select="*")
    found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    return all(map(torch.equal, plain, found))


def _plan() -> bool:
    chosen = plan(_body, _input(), budget="100%")
    policy = checkpoint_policies.from_plan(chosen)
    return _has_plain_gradient(checkpoint(_body, policy=policy))


def _compile() -> bool:
    return _has_plain_gradient(torch.compile(checkpoint(_body), backend="aot_eager"))


def _report() -> bool:
    return len(saved_residuals(checkpoint(_body), _input())) > 0


FEATURES: dict[str, Callable[[], bool]] = {
    "checkpoint": lambda: _has_plain_gradient(checkpoint(_body)),
    "checkpoint with a policy": lambda: _has_plain_gradient(checkpoint(_body, policy="dots")),
    "checkpoint of an autograd.Function": _call_function,
    "torch.func of a checkpoint": _transform,
    "vmap with a named axis": _map,
    "nn.wrap": _wrap,
    "plan": _plan,
    "make_graph": lambda: "tanh" in str(make_graph(_body)(_input())),
    "reports": _report,
    "torch.compile of a checkpoint": _compile,
    "jit": lambda: torch.allclose(jit(_body)(_input()), _body(_input())),
}
"""Attempts at each feature, which return whether the results are those of plain PyTorch."""

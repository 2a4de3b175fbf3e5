"""Every operator that PyTorch differentiates, under checkpoint, on PyTorch's own samples."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import torchremat as tr
from tests.helpers import (
    assert_same,
    derivatives,
    leaves_of,
    nothing_left_behind,
    skip_in_2_11,
    weighted_sum,
)
from torchremat.errors import EffectWarning, RetraceWarning, UnmatchedWarning

pytest.importorskip("expecttest", reason="PyTorch's own tests need it")
from tests.op_samples import OPS, Sample, samples

POLICIES = {
    "nothing": tr.checkpoint_policies.nothing_saveable,
    "dots": tr.checkpoint_policies.dots_saveable,
    "everything": tr.checkpoint_policies.everything_saveable,
}
NUM_SAMPLES = 4
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "operators.md"

# --- what does not hold --------------------------------------------------------------------------

Table = list[tuple[str, str, str]]
"""Rows: why; for which laws or values, separated by commas; of which operators, by spaces."""

LIMITS: Table = [
    (
        "the shape of the result depends on values, and a trace has none",
        "first, vmap(grad)",
        "combinations masked_select repeat_interleave",
    ),
    (
        "PyTorch reads the values of its arguments: what to refuse, or how long the result is",
        "first, vmap(grad)",
        "cov istft linalg.lstsq linalg.lstsq.grad_oriented narrow nn.functional.ctc_loss",
    ),
    (
        "PyTorch reads the values of its arguments, so that its own vmap fails as well",
        "first",
        "nn.functional.gaussian_nll_loss tensor_split",
    ),
    (
        "PyTorch's derivative by the values that are put in reads the indices or the mask",
        "first, vmap(grad)",
        "index_fill index_put",
    ),
    (
        "PyTorch's second derivative reads values",
        "second",
        "index_reduce.prod scatter_reduce.prod trace",
    ),
    (
        "where PyTorch finds no zero among the values it differentiates by another formula: it has "
        "zeros where that of all values, which a trace has, knows no dependence",
        "second",
        "prod",
    ),
    (
        "PyTorch takes another path when it is traced, which it cannot differentiate twice",
        "second",
        "nn.functional.linear_cross_entropy.chunked_none",
    ),
    (
        "sparse tensors are refused",
        "first",
        "sparse.mm.reduce sparse.sampled_addmm",
    ),
]

FAULTS: Table = [
    (
        "in evaluation mode its statistics are empty, and PyTorch's rule for the derivative of a "
        "batch does not take them when they have been saved",
        "vmap(grad)",
        "_native_batch_norm_legit",
    ),
]

ROUNDED: Table = [
    (
        "PyTorch chooses among formulas by whether a value is zero; a trace takes the one for all",
        "derivative 1, derivative 1 with create_graph, derivative 2",
        "masked.prod prod",
    ),
    (
        "as above",
        "derivative 1 with create_graph, derivative 2",
        "cumprod linalg.det linalg.vander masked.cumprod",
    ),
    (
        "under torch.func PyTorch has another formula",
        "vmap(grad)",
        "nn.functional.binary_cross_entropy_with_logits",
    ),
]


def by_name(*tables: Table) -> dict[str, dict[str, str]]:
    """The tables as dicts: for each operator what is in them, each with its reason."""
    found: dict[str, dict[str, str]] = {}
    for reason, whats, names in (row for table in tables for row in table):
        for name in names.split():
            found.setdefault(name, {}).update(dict.fromkeys(whats.split(", "), reason))
    return found


BROKEN = by_name(LIMITS, FAULTS)
CLOSE = by_name(ROUNDED)


def as_document() -> str:
    """The tables as a page of the documentation."""
    tables = [
        ("Not supported", "what is refused or fails", LIMITS),
        ("Faults", "what fails", FAULTS),
        ("Equal but for rounding", "what is equal to 1e-12 only", ROUNDED),
    ]
    parts = [
        "# Operators under `checkpoint`\n\n"
        "`scripts/sweep_ops.py` writes this page from the tables of\n"
        "`tests/remat/test_op_db.py`. The slow tests check that the tables are exact.\n\n"
        "The sweep runs every operator that PyTorch differentiates on the CPU, on PyTorch's own\n"
        "samples in double precision. It runs each under `nothing_saveable`, `dots_saveable`\n"
        "and `everything_saveable`. It compares the value and the first derivative (below:\n"
        "first), the second derivative (second), `vmap(grad)` where plain PyTorch has it, and\n"
        "the random stream afterwards. Results that are not listed here are equal to plain\n"
        "PyTorch to the bit. An operator is listed if one of its samples fails; others may\n"
        "work.\n"
    ]
    for title, heading, table in tables:
        if table:
            rows = [
                f"| {' '.join(f'`{name}`' for name in names.split())} | {whats} | {reason} |"
                for reason, whats, names in table
            ]
            parts.append(
                "\n".join(
                    [
                        f"## {title}\n",
                        f"| operators | {heading} | why |",
                        "|---|---|---|",
                    ]
                )
                + "\n"
                + "\n".join(rows)
                + "\n"
            )
    return "\n".join(parts)


# --- one sample ----------------------------------------------------------------------------------


def numbers(tree: Any) -> Any:
    """`tree` with tensors that have memory, dense and contiguous, so that bits can be compared."""
    return pytree.tree_map(lambda t: _numbers(t) if isinstance(t, Tensor) else t, tree)


def _numbers(t: Tensor) -> Tensor:
    if t._is_zerotensor():
        return torch.zeros(t.shape, dtype=t.dtype)
    t = t if t.layout == torch.strided else t.to_dense()
    return torch.empty(t.shape, dtype=t.dtype).copy_(t)


def run(function: Callable[..., Any], sample: Sample, order: int) -> dict[str, Any]:
    """What `derivatives` finds, and where the random stream stands afterwards."""
    tensors, wrt = sample.fresh()
    found = derivatives(function, tensors, wrt, order=order)
    found = {key.replace(", ", " with "): value for key, value in found.items()}
    if order == 2:  # a gradient that nothing depends on may require one or not
        found.setdefault("derivative 2", (None,) * len(wrt))
    return numbers({**found, "generator": torch.get_rng_state()})


def run_batched(
    function: Callable[..., Any], sample: Sample, chosen: Sequence[bool]
) -> dict[str, Any]:
    """The gradients of two examples, the sample and a smaller one; `chosen` are the outputs."""
    positions = [i for i, wanted in enumerate(sample.is_differentiated) if wanted]

    def loss(*values: Tensor) -> Tensor:
        full = [t.detach() for t in sample.tensors]
        for i, value in zip(positions, values, strict=True):
            full[i] = value
        outputs = leaves_of(function(*full))
        return weighted_sum([o if c else None for o, c in zip(outputs, chosen, strict=True)])

    torch.manual_seed(7)
    both = [torch.stack([t, 0.75 * t]) for t in (sample.tensors[i].detach() for i in positions)]
    grad = torch.func.grad(loss, argnums=tuple(range(len(both))))
    found = torch.func.vmap(grad, randomness="different")(*both)
    return numbers({"vmap(grad)": found, "generator": torch.get_rng_state()})


def laws(sample: Sample, order: int) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """What must hold: its name, what to do with a function, and what plain PyTorch finds.

    What PyTorch cannot do itself is no law.
    """
    try:
        first = run(sample.function, sample, 1)
    except RuntimeError:
        return
    yield "first", lambda f: run(f, sample, 1), first
    if order > 1:
        try:
            second = run(sample.function, sample, 2)
        except RuntimeError:
            pass
        else:
            yield "second", lambda f: run(f, sample, 2), second
    chosen = first["requires_grad"]
    try:
        batched = run_batched(sample.function, sample, chosen)
    except RuntimeError:
        return
    yield "vmap(grad)", lambda f: run_batched(f, sample, chosen), batched


# --- one operator --------------------------------------------------------------------------------


def sweep(name: str, count: int, policies: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """The laws that do not hold, each with what is wrong; and the values that are rounded."""
    broken: dict[str, str] = {}
    rounded: set[str] = set()
    order = 2 if OPS[name].supports_gradgrad else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the samples and of PyTorch's vmap
        for ours in (EffectWarning, RetraceWarning, UnmatchedWarning):
            warnings.simplefilter("error", ours)
        for sample in samples(name, count):
            for law, measure, expected in laws(sample, order):
                if law == "second" and "first" in broken:
                    continue
                for policy in policies:
                    function = tr.checkpoint(sample.function, policy=POLICIES[policy])
                    try:
                        with nothing_left_behind():
                            rounded |= rounded_values(measure(function), expected)
                    except Exception as error:
                        broken.setdefault(law, f"{policy}: {type(error).__name__}: {error}")
    return broken, rounded


def rounded_values(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    """The names of what is equal only to rounding; fails for what differs."""
    assert found.keys() == expected.keys()
    names = set()
    for key, value in expected.items():
        try:
            assert_same(found[key], value, key)
        except AssertionError:
            assert_same(found[key], value, key, close=True)
            names.add(key)
    return names


def check(name: str, broken: dict[str, str], rounded: set[str]) -> None:
    """Fail for what does not hold and is not in the tables."""
    unknown = {law: what for law, what in broken.items() if law not in BROKEN.get(name, ())}
    assert not unknown, f"{name}: {unknown}"
    more = rounded - set(CLOSE.get(name, ()))
    assert not more, f"{name} is equal to plain PyTorch only to rounding in {sorted(more)}"


# `svd_lowrank` takes seconds to trace
EVERY_FIFTH = [name for name in list(OPS)[::5] if name != "svd_lowrank"]


@pytest.mark.parametrize("name", EVERY_FIFTH)
@pytest.mark.sampled(3)
def test_one_sample(name: str) -> None:
    if name == "quantile":
        skip_in_2_11("quantile compares the values of its argument under vmap")
    check(name, *sweep(name, 1, ["dots"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_samples_under_every_policy(name: str) -> None:
    broken, rounded = sweep(name, NUM_SAMPLES, list(POLICIES))
    check(name, broken, rounded)
    assert broken.keys() == BROKEN.get(name, {}).keys(), "listed as not supported, but it is"
    assert rounded == CLOSE.get(name, {}).keys(), "listed as rounded, but it is not"


def test_tables_list_operators_and_laws() -> None:
    skip_in_2_11("it lacks operators that the tables list")
    assert BROKEN.keys() | CLOSE.keys() <= OPS.keys()
    assert {law for found in BROKEN.values() for law in found} <= {
        "first",
        "second",
        "vmap(grad)",
    }


def test_document_says_what_the_tables_say() -> None:
    assert DOCUMENT.read_text() == as_document(), "run scripts/sweep_ops.py --write"


def test_sweep_finds_a_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tr, "checkpoint", lambda function, policy: lambda x: 2 * function(x))
    broken, _ = sweep("exp", 1, ["dots"])
    assert broken.keys() == {"first", "vmap(grad)"}
    monkeypatch.setattr(tr, "checkpoint", lambda function, policy: lambda x: function(x).detach())
    broken, _ = sweep("exp", 1, ["dots"])
    assert broken.keys() == {"first", "vmap(grad)"}

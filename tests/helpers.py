"""Shared by the tests: counts of operators, equality to the bit, what is still alive."""

import gc
import json
import random
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

IS_2_11 = torch.__version__.startswith("2.11.")
IS_BEFORE_2_13 = IS_2_11 or torch.__version__.startswith("2.12.")


def one_in(step: int, *lists: Iterable[Any]) -> list[Any]:
    """The combinations of the entries; every `step`th alone runs without scripts/test_slow.sh."""
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if i % step else [])
        for i, case in enumerate(product(*lists))
    ]


def skip_in_2_11(defect: str) -> None:
    """Skip the rest of the test in PyTorch 2.11, which has the `defect`."""
    if IS_2_11:
        pytest.skip(f"PyTorch 2.11: {defect}")


def skip_before_2_13(defect: str) -> None:
    """Skip the rest of the test in PyTorch 2.11 and 2.12, which have the `defect`."""
    if IS_BEFORE_2_13:
        pytest.skip(f"PyTorch 2.11 and 2.12: {defect}")


class OpCounter(TorchDispatchMode):
    """Counts the operators that run while it is active, by name without overload: `aten.sin`."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func).rpartition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, name: str) -> int:
        """How often the operator `name` ran; the namespace `aten` may be left out."""
        return self.counts[name if "." in name else f"aten.{name}"]

    def only(self, *names: str) -> dict[str, int]:
        """The counts of `names`."""
        return {name: self[name] for name in names}


def grad_counts(fun: Callable[[], Tensor], wrt: Any, *names: str) -> tuple[Any, Any]:
    """How often the operators `names` run forward and backward: numbers, or dicts for several.

    `fun()` must have run before if its trace is not to be counted; a trace runs no operator on
    real tensors anyway.
    """
    with OpCounter() as forward:
        out = fun()
    with OpCounter() as backward:
        torch.autograd.grad(out.sum(), wrt)
    if len(names) == 1:
        return forward[names[0]], backward[names[0]]
    return forward.only(*names), backward.only(*names)


def in_kib(nbytes: int) -> str:
    """Three figures of a size between 1 KiB and 1 MiB, as reports and pictures print it."""
    return f"{nbytes / 1024:#.3g} KiB".replace(". ", " ")


# --- equality ------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> bytes:
    """The values of `tensor` as they lie in memory, in the order of its indices."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes()


def differences(a: Any, b: Any, *, close: bool = False) -> list[str]:
    """How two trees differ: structure, types, dtypes, shapes, bits; nothing if they do not.

    `close` allows for rounding: 1e-12 relative in double precision, 1e-5 in single.
    """
    leaves_a, spec_a = pytree.tree_flatten_with_path(a)
    leaves_b, spec_b = pytree.tree_flatten_with_path(b)
    if spec_a != spec_b:
        return [f"structure: {spec_a} and {spec_b}"]
    found = []
    for (path, x), (_, y) in zip(leaves_a, leaves_b, strict=True):
        fault = _difference(x, y, close)
        if fault:
            found.append(f"{pytree.keystr(path) or 'the value'}: {fault}")
    return found


def _difference(x: Any, y: Any, close: bool) -> str | None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        same = type(x) is type(y) and x == y
        return None if same else f"{x!r} and {y!r}"
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
    if bits(x) == bits(y):
        return None
    if close:
        single = x.dtype in (torch.float32, torch.complex64)
        tolerance = 1e-5 if single else 1e-12
        if torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
            return None
    return f"differ by at most {(x.detach() - y.detach()).abs().max().item():.3g}: {x} and {y}"


def assert_same(a: Any, b: Any, what: str = "", *, close: bool = False) -> None:
    """Fail unless the trees are equal to the bit, or to rounding if `close`."""
    found = differences(a, b, close=close)
    assert not found, f"{what}: " + "; ".join(found)


# --- derivatives ---------------------------------------------------------------------------------


def leaves_of(tree: Any) -> list[Tensor]:
    """The tensors in `tree`."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def weighted_sum(outputs: Sequence[Tensor | None]) -> Tensor:
    """A loss linear in the `outputs`, with a fixed random weight for each number at its place."""
    terms = []
    for i, output in enumerate(outputs):
        if output is not None:
            generator = torch.Generator().manual_seed(i)
            weights = torch.randn(output.shape, generator=generator, dtype=torch.double)
            product = output * weights.to(output.dtype)
            terms.append((product.real if product.is_complex() else product).sum())
    return sum(terms[1:], terms[0])


def derivatives(
    fun: Callable[..., Any], args: Any, wrt: Sequence[Tensor], kwargs: Any = None, *, order: int = 2
) -> dict[str, Any]:
    """The value of `fun` and its derivatives up to `order`, each an entry.

    Each derivative is that of a loss that is linear in the one before. The first is taken twice if
    there is a second, without `create_graph` and with: PyTorch has two formulas for some operators.
    """
    torch.manual_seed(7)
    output = fun(*args, **(kwargs or {}))
    outputs = [t if t.requires_grad else None for t in leaves_of(output)]
    found: dict[str, Any] = {
        "value": pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, output),
        "requires_grad": [t is not None for t in outputs],
    }
    for number in range(1, order + 1):
        if not any(found["requires_grad"]) or not any(t is not None for t in outputs):
            break
        loss = weighted_sum(outputs)
        last = number == order
        grads = torch.autograd.grad(loss, wrt, allow_unused=True, retain_graph=not last)
        found[f"derivative {number}"] = grads
        if not last:
            grads = torch.autograd.grad(loss, wrt, allow_unused=True, create_graph=True)
            found[f"derivative {number}, create_graph"] = [
                None if g is None else g.detach() for g in grads
            ]
            outputs = [g if g is not None and g.requires_grad else None for g in grads]
    return found


class RandomPolicy:
    """Lets each value be saved or not by a coin, the same in each run of the tests."""

    def __init__(self, seed: int) -> None:
        self.coins = random.Random(seed)

    def __call__(self, op: Any, *avals: Any, **params: Any) -> bool:
        return self.coins.random() < 0.5


class Choosing:
    """A policy that answers from a list of choices, from the start again at its end."""

    def __init__(self, choices: Sequence[bool]) -> None:
        self.choices = list(choices)
        self.asked = 0

    def __call__(self, op: Any, *avals: Any, **params: Any) -> bool:
        self.asked += 1
        return self.choices[(self.asked - 1) % len(self.choices)]


# --- threads -------------------------------------------------------------------------------------


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run the functions at the same time; return what they return, or raise what one raises."""
    results: list[Any] = [None] * len(works)
    barrier = threading.Barrier(len(works))

    def run(i: int) -> None:
        try:
            barrier.wait()
            results[i] = works[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# --- what is left behind -------------------------------------------------------------------------


def assert_freed(*references: weakref.ref) -> None:
    """Fail if one of the objects is still alive after garbage collection."""
    gc.collect()
    alive = [r() for r in references if r() is not None]
    assert not alive, f"still alive: {alive}"


def state_of_pytorch() -> dict[str, Any]:
    """What a trace changes while it runs, and must leave as it was."""
    from torch.autograd.function import _SingleLevelFunction
    from torch.overrides import _get_current_function_mode_stack

    stack = torch._C._functorch.get_interpreter_stack()
    return {
        "function modes": list(_get_current_function_mode_stack()),
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "levels of torch.func": len(stack or ()),
        "Function.apply": vars(_SingleLevelFunction).get("apply"),
        "module hooks": (
            dict(torch.nn.modules.module._global_forward_hooks),
            dict(torch.nn.modules.module._global_forward_pre_hooks),
        ),
        "Module.__call__": torch.nn.Module.__call__,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "saved_tensors_hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "dual level": torch.autograd.forward_ad._current_level,
        "jvp nesting": torch._functorch.eager_transforms.JVP_NESTING,
        "dispatch keys": (
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        ),
        "tracer": torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER,
    }


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail if the block leaves PyTorch in another state, also when it raises."""
    before = state_of_pytorch()
    try:
        yield
    finally:
        after = state_of_pytorch()
        changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
        assert not changed, f"left behind: {changed}"


def peak_of(step, *, counts_workspaces=True):
    """The allocator tells the profiler of each block. A counting mode would turn Dynamo off."""
    with memory_profiler() as profiler:
        found = step()
    return found, allocated_peak(profiler, counts_workspaces=counts_workspaces)


def memory_profiler():
    options = {"profile_memory": True, "acc_events": True}  # 2.11 warns without the second
    return profile(activities=[ProfilerActivity.CPU], **options)


def allocated_peak(profiler, *, counts_workspaces=True):
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    blocks = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    changes = [(block["args"]["Addr"], block["args"]["Bytes"]) for block in blocks]
    left = changes if counts_workspaces else without_workspaces(changes)
    return max(accumulate(nbytes for _, nbytes in left))


def without_workspaces(changes):
    """Leave out a block that is freed before there is another: some CPUs' kernels take one."""
    left = []
    for address, nbytes in changes:
        if left and left[-1] == (address, -nbytes):
            left.pop()
        else:
            left.append((address, nbytes))
    return left


class _Hands(torch.autograd.Function):
    """Takes tensors, and hands on the cotangents of a list, where it leaves those of scalars."""

    @staticmethod
    def forward(ctx, cotangents, *outputs):
        ctx.cotangents = cotangents
        return _make_nothing()

    @staticmethod
    def backward(ctx, _):
        given = tuple(ctx.cotangents)
        if hasattr(torch.autograd.Function, "boxed_grads_call"):  # else autograd holds all of them
            ctx.cotangents[:] = [ct for ct in given if ct.ndim == 0]
        return None, *given


def _make_nothing():
    with _disable_current_modes():
        return torch.empty(0)


def gradients_handed_on(outputs, wrt, cotangents):
    """`torch.autograd.grad`, whose caller holds the cotangents of scalars alone, as for a loss.

    The list `cotangents` has no other afterwards, as in the midst of a larger backward pass. An
    older PyTorch holds all of them while a function of ours runs, and so does the caller there.
    """
    root = _Hands.apply(cotangents, *outputs)
    return torch.autograd.grad(root, wrt, _make_nothing(), allow_unused=True)

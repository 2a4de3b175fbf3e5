"""Errors of PyTorch in a traced function, raised again in the words of this package.

Each message names the line of the user's code and says what to write there instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchremat import _torch
from torchremat.core.source import source_of_error
from torchremat.errors import (
    ConcretizationError,
    EffectError,
    NotAvailableError,
    TraceError,
)

_WRITE_TO_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"

_NO_NUMPY = (
    ".numpy() is not supported",
    "tolist() is not supported",
    "Cannot access data pointer",
    "its data is not allocated yet",
    "passed to FakeTensor.__format__",
)
"""Texts of the errors that PyTorch raises where the values of a fake tensor are needed."""


_REFUSALS_OF_DYNAMO = ("UncapturedHigherOrderOpError", "Unsupported")
"""Names of the errors of PyTorch's Dynamo, which reads the branches of `torch.cond`."""

# of an operator such as cond, where its graph runs in forward mode
_NO_FORWARD_RULE = "TransformType.Jvp"


def needs_value(error: BaseException) -> bool:
    """Whether `error` says that the value of a traced tensor is needed."""
    if isinstance(error, (ConcretizationError, *_torch.DATA_DEPENDENT_ERRORS)):
        return True
    return isinstance(error, RuntimeError | TypeError) and any(t in str(error) for t in _NO_NUMPY)


@contextmanager
def explain_errors(get_refusal: Callable[[], TraceError | None]) -> Iterator[None]:
    """Explain what the user's code did in the block that a trace cannot.

    `get_refusal` returns the error of a tensor that could not become an input: operators of Python
    (`x @ w`) replace it by a `TypeError`.
    """
    try:
        yield
    except ConcretizationError:
        raise
    except _torch.DATA_DEPENDENT_ERRORS as error:
        raise _concretization_error(error, str(getattr(error, "func", error))) from error
    except AttributeError as error:
        if not isinstance(error.obj, _torch.FakeTensor):
            raise
        raise TraceError(
            f"a traced tensor has no attribute {error.name!r}, which is read at "
            f"{source_of_error(error)}: while a function is traced, a plain tensor stands for "
            "one of a subclass (a DTensor, say). Use operators of PyTorch alone, or do what "
            "needs the subclass outside the checkpoint."
        ) from error
    except (RuntimeError, TypeError) as error:
        explain_unmapped_operator(error)
        _explain_branches(error)
        if needs_value(error):
            raise _concretization_error(error, str(error)) from error
        if str(error).startswith(_WRITE_TO_LEAF):
            raise EffectError(
                f"the function writes in place, at {source_of_error(error)}, to a tensor that has "
                "a gradient and that it closes over or is given. Write to a copy (x.clone())."
            ) from error
        refusal = get_refusal()
        if isinstance(error, TypeError) and refusal is not None and error is not refusal:
            raise refusal from error
        raise


def explain_unmapped_operator(error: Exception) -> None:
    """Raise in other words if `error` says that `vmap` cannot map an operator."""
    if not isinstance(error, RuntimeError) or isinstance(error, NotAvailableError):
        return
    name = _torch.find_unmapped_operator(error)
    if name is not None:
        raise NotAvailableError(
            f"{name}, at {source_of_error(error)}, has no batching rule, and PyTorch cannot run "
            "it in a loop. Register a rule for it (torchremat.batching.primitive_batchers), or "
            "call it from a function under torchremat.sequential_vmap. A custom operator may be "
            "given one by its register_vmap."
        ) from error


def _explain_branches(error: Exception) -> None:
    """Raise in other words if `error` says that PyTorch cannot trace or differentiate branches."""
    lines = str(error).strip().split("\n")
    kind, place = type(error), source_of_error(error)
    if kind.__name__ in _REFUSALS_OF_DYNAMO and kind.__module__.startswith("torch."):
        reason = next((line for line in lines if line.strip() and "captured" not in line), lines[0])
        refused = f"PyTorch cannot trace it there ({reason.strip()})"
    elif lines[0] == _NO_FORWARD_RULE:
        refused = "PyTorch has no rule of forward mode for it"
    else:
        return
    raise NotAvailableError(
        f"torch.cond, or an operator like it{f', at {place}' if place else ''}: {refused}. Its "
        "branches may call operators, and be differentiated once, in reverse mode alone. "
        "Compute both branches and choose with torch.where, or move a function with a rule "
        "of its own (custom_jvp, custom_vjp) out of the branch."
    ) from error


def _concretization_error(error: BaseException, reader: str) -> ConcretizationError:
    return ConcretizationError(
        f"the value of a traced tensor is needed at {source_of_error(error)}, through {reader}. "
        "While a function is traced, a tensor has a shape and a dtype, but no value. If it is an "
        "argument that takes few values, name it in `static_argnums` and pass a Python value. To "
        "choose between two tensors use torch.where; between two functions, torch.cond."
    )

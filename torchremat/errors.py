"""The errors and warnings that torchremat raises.

Each is a subclass of the standard exception that fits, so that `except TypeError` works as a user
expects, and of `TorchrematError`, so that all can be caught together.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TorchrematError(Exception):
    """The base of every error that torchremat raises on purpose."""


class ConcretizationError(TorchrematError, TypeError):
    """Python asked for the value of a traced tensor (`if x > 0`, `x.item()`, `float(x)`)."""


class EffectError(TorchrematError, RuntimeError):
    """The traced function did something that a graph cannot replay."""


class TraceError(TorchrematError, TypeError):
    """An argument or result of a function to trace is not a tree of tensors and scalars."""


class PolicyError(TorchrematError, TypeError):
    """A policy is no policy, or answered something that is no verdict."""


class NoMatchError(TorchrematError, ValueError):
    """A selection of modules matches nothing."""


class GraphError(TorchrematError, ValueError):
    """A graph breaks a rule that every typed graph obeys, or does not fit what is asked of it."""


class RetraceError(TorchrematError, RuntimeError):
    """A function, traced a second time for a higher derivative, computed something else."""


class RecomputationError(TorchrematError, RuntimeError):
    """A value that was computed again is not what it was: see `config.verify_recomputation`."""


class DonationError(TorchrematError, RuntimeError):
    """A tensor that must not be donated was, or the values of one that was donated are used."""


class DerivativeTypeError(TorchrematError, TypeError):
    """A derivative was asked for of, or given, what has none: integers, other trees or dtypes."""


class DerivativeShapeError(TorchrematError, ValueError):
    """A tangent or cotangent has another shape than the value that it belongs to."""


class MissingRuleError(TorchrematError, AttributeError):
    """A function with rules of its own for derivatives is called before they are defined."""


class RuleTypeError(TorchrematError, TypeError):
    """A rule for derivatives gives, or is given, what is not of the right structure."""


class RuleValueError(TorchrematError, ValueError):
    """A rule for derivatives gives cotangents of the wrong shapes or dtypes."""


class ForwardModeError(TorchrematError, TypeError):
    """A function that has only a rule for reverse mode is differentiated in forward mode."""


class ClosureError(TorchrematError, RuntimeError):
    """A function with rules is differentiated with respect to a tensor that it closes over."""


class DonationWarning(UserWarning):
    """A donated tensor's storage is of no use: no output has its size and dtype."""


class UnmatchedWarning(UserWarning):
    """A name, operator or pattern of a policy matches nothing in what was traced."""


class RetraceWarning(UserWarning):
    """A function is traced again and again, for something that changes from call to call."""


class EffectWarning(UserWarning):
    """The traced function did something that a graph does not replay, and that may not matter."""


class PolicyValueError(TorchrematError, ValueError):
    """A policy was asked for with a value that it cannot have, or is spelled wrongly."""


class BudgetError(TorchrematError, RuntimeError):
    """No plan keeps within the budget; `least_bytes` is the least that can be met."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.least_bytes)


class BudgetTypeError(TorchrematError, TypeError):
    """A budget is neither a number nor text."""


class BudgetSpellingError(TorchrematError, ValueError):
    """A budget is misspelt, not positive, or a fraction above 1."""


class PlanError(TorchrematError, ValueError):
    """A plan cannot be read, or is of another graph or another version."""


class OptionError(TorchrematError, ValueError):
    """An option that is none, or has a value that it cannot have."""


class UnknownOpError(TorchrematError, ValueError):
    """A name that should be an operator's is none that PyTorch knows."""


class SegmentError(TorchrematError, ValueError):
    """Offsets or lengths of segments that do not fit the data."""


class SegmentTypeError(TorchrematError, TypeError):
    """An operator on segments was given something that is no tensor, or of a dtype without it."""


class AxisError(TorchrematError, ValueError):
    """An axis of `vmap` that a value does not have, or sizes of axes that do not agree."""


class AxisTypeError(TorchrematError, TypeError):
    """What was given for an axis of `vmap` is none, or the value has no axes."""


class RegistrationError(TorchrematError, ValueError):
    """A rule or a type cannot be registered so, or is not registered."""


class RuleError(TorchrematError, ValueError):
    """A batching rule that a user wrote gave what is no result, or cannot be used here."""


class LoopWarning(UserWarning):
    """An operator that has no batching rule runs in a loop, once for each example."""


class RaggedError(TorchrematError, ValueError):
    """Sizes that differ from element to element of a batch were used where they cannot be."""


class RaggedTypeError(TorchrematError, TypeError):
    """A Pile without `pile_axis`, `pile_axis` without a Pile, or elements that make up no Pile."""


class DeviceError(TorchrematError, RuntimeError):
    """A kind of device, or a process, was asked for that is not there."""


class AxisNameError(TorchrematError, NameError):
    """A named axis is asked for where none of that name is in scope, or can be reached."""


class CollectiveError(TorchrematError, ValueError):
    """A collective over a named axis was given sizes, groups or dimensions that do not fit it."""


class CollectiveTypeError(TorchrematError, TypeError):
    """A collective over a named axis was given something that is neither tensor nor number."""


class PermutationError(CollectiveError, AssertionError):
    """A permutation of a named axis is none, or leaves out some of it."""


class NotAvailableError(TorchrematError, NotImplementedError):
    """The contract names this, and this version does not have it yet."""


def nearest_names(asked: str, known: Iterable[str], *, limit: int = 3) -> str:
    """What to say of `known` to someone who asked for `asked`: the names like it, else the first.

    >>> nearest_names("atn", ["attn", "mlp"])
    "nearest: 'attn'"
    >>> nearest_names("x", ["attn", "mlp"])
    "there are: 'attn', 'mlp'"
    >>> nearest_names("x", [])
    'there are none'
    """
    names = sorted(set(known))
    if not names:
        return "there are none"
    if near := get_close_matches(asked, names, n=limit):
        return "nearest: " + ", ".join(map(repr, near))
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return "there are: " + ", ".join(map(repr, names[:limit])) + more

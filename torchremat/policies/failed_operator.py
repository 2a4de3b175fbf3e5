"""The operator at which memory ran out, for the note that a policy gives."""

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class FailedOperator:
    """The operator at which memory ran out.

    Attributes:
        phase: of the step: `"forward"` or `"backward"`.
        node: its node; `None` if it is not known, as behind a compiler.
    """

    phase: str
    node: fx.Node | None

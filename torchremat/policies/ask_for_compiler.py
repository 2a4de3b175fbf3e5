"""To ask a policy while a compiler captures a program."""

from torchremat.core.source import source_of_error
from torchremat.errors import PolicyFailedError, TorchrematError
from torchremat.policies.policy import Policy, Value
from torchremat.policies.verdicts import Verdict, as_verdict


def decide_for_compiler(policy: Policy, value: Value) -> Verdict:
    """`policy.decide(value)`, where a compiler would report a user's error as its own.

    Raises `PolicyFailedError` (a `RuntimeError`) for any error of the user's.
    """
    try:
        return as_verdict(policy.decide(value), policy, value.op)
    except TorchrematError:
        raise
    except Exception as error:
        given = ", ".join([*map(str, value.avals), *value.params])
        where = f", at {value.source}" if value.source else ""
        line = source_of_error(error)
        raise PolicyFailedError(
            f"the policy {policy!r}, called for {value.op}({given}){where}, raised "
            f"{type(error).__name__}{f' at {line}' if line else ''}: {error}. A policy is "
            "called while the program is captured, with operators and avals (shape, dtype, "
            "device): there are no values of tensors yet"
        ) from error

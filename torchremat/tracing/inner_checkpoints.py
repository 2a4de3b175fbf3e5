"""Calls of `torch.utils.checkpoint` in a trace: only their functions run, as a policy decides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchremat.core.source import warn_user
from torchremat.errors import OverrideWarning


@dataclass
class CallOnly:
    """Handles a call of `torch.utils.checkpoint` by a call of its function; may warn, once."""

    warns: bool

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context_fn: Any,
    ) -> Any:
        if self.warns:
            self.warns = False
            warn_user(
                "torch.utils.checkpoint in a function under a policy only calls its function: the "
                "policy around it decides what is saved. Take it out (in transformers, "
                "gradient_checkpointing_disable()), or leave this part without a policy",
                OverrideWarning,
            )
        return function(*args, **kwargs)

"""An optimizer's state in the host's memory, but for that of the update that runs.

gradients    g3         g2         g1
brought      3          2          1          before the gradient, once the order is known
updates         p3         p2         p1
sent               3          2          1
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchremat import config
from torchremat.optim.per_parameter import Group, update_parameter
from torchremat.remat.offload.copies import bring_early, fetch_value, to_host, wait_for_copies
from torchremat.remat.offload.host_pool import holds


def can_leave(value: object) -> bool:
    """Whether an entry of a state is a tensor large enough to be sent to the host."""
    return isinstance(value, Tensor) and _count_bytes(value) >= config.least_offload_nbytes


def _count_bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


class StateOnHost:
    """Updates parameters one at a time, and leaves their state in the host's memory after each."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._next: dict[Tensor, Tensor] = {}
        """The parameter that was updated after each, when it was last."""
        self._last: Tensor | None = None
        self._handle = optimizer.register_state_dict_pre_hook(_wait)

    def update(self, group: Group, parameter: Tensor) -> None:
        """`update_parameter`, with the state brought before and sent after it."""
        self._bring(parameter)
        if self._last is not None:
            self._next[self._last] = parameter
        self._last = parameter
        following = self._next.get(parameter)
        if following is not None:
            for _, value in self._list_sent(following):
                bring_early(value)
        update_parameter(self._optimizer, group, parameter)
        state = self._state_of(parameter)
        for key, value in list(state.items()):
            if can_leave(value) and value.device == parameter.device:
                state[key] = to_host(value)

    def end_step(self) -> None:
        """Forget what was updated last: the next step begins anew."""
        self._last = None

    def remove(self) -> None:
        """Bring all state back to where its parameters are."""
        self._handle.remove()
        for parameter in list(self._optimizer.state):
            self._bring(parameter)

    def _bring(self, parameter: Tensor) -> None:
        state = self._state_of(parameter)
        for key, value in self._list_sent(parameter):
            state[key] = fetch_value(value, parameter.device)

    def _list_sent(self, parameter: Tensor) -> list[tuple[Any, Tensor]]:
        return [(key, v) for key, v in self._state_of(parameter).items() if _is_sent(v)]

    def _state_of(self, parameter: Tensor) -> dict[Any, Any]:
        found: dict[Any, Any] = self._optimizer.state.get(parameter, {})
        return found


def _is_sent(value: object) -> bool:
    return isinstance(value, Tensor) and holds(value.untyped_storage())


def _wait(optimizer: Optimizer) -> None:
    """Before a `state_dict`: whoever reads it sees copies that are done."""
    wait_for_copies()


def count_state_bytes(state: Mapping[Tensor, Mapping[Any, Any]]) -> Iterator[int]:
    """The bytes of each tensor on the device, where the others of `state` are sent to the host.

    Beside those that stay there are three parameters' states: of the one that is updated, of the
    next, on its way here, and of the one before, on its way back.
    """
    sent: list[list[int]] = []
    for found in state.values():
        tensors = [value for value in found.values() if isinstance(value, Tensor)]
        yield from (_count_bytes(value) for value in tensors if not can_leave(value))
        sent.append([_count_bytes(value) for value in tensors if can_leave(value)])
    for sizes in sorted(sent, key=sum)[-3:]:
        yield from sizes

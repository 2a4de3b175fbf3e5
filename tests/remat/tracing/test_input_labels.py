"""The names that a user knows the inputs of a call by."""

import torch

from torchremat.remat.tracing.input_labels import BoundCall


def test_bound_call_of_a_builtin():
    call = BoundCall(torch.add, (torch.ones(2), torch.ones(2)), {"alpha": 2})
    assert [label.text for label in call.labels] == ["args[0]", "args[1]"]
    assert call.name == "add"

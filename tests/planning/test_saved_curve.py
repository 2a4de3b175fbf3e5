"""The curve of added time against saved bytes."""

import torch
from torch import fx, nn

from torchremat.checkpoint_policies import memory_budget
from torchremat.compile.dynamo.partition import trace_joint
from torchremat.planning.saved_curve import SavedPoint, trace_saved_curve


def curve_of(module: nn.Module, *inputs: torch.Tensor) -> list[SavedPoint]:
    joint = trace_joint(fx.symbolic_trace(module), inputs)
    assert joint is not None
    return list(trace_saved_curve(memory_budget("50%").planner(joint, fuses=False)))


class Writes(nn.Module):
    def forward(self, x, y):
        x.mul_(2.0)
        return (x + y,)


def test_a_written_input_is_copied_for_nobody_who_does_not_read_it_again():
    x, y = torch.ones(1024), torch.ones(1024, requires_grad=True)
    (point,) = curve_of(Writes(), x, y)
    assert point.saved_bytes == 0
    assert not point.inputs


class Multiplies(nn.Module):
    def forward(self, x, y, z):
        return (torch.tanh(x + z) * y,)


def test_points_tell_which_inputs_are_read():
    x, y, z = (torch.ones(1024, requires_grad=True) for _ in range(3))
    all_saved, nothing_saved = curve_of(Multiplies(), x, y, z)
    assert all_saved.inputs == {1}
    assert nothing_saved.inputs == {0, 1, 2}
    assert not all_saved.reads_outputs


class GivesTanh(nn.Module):
    def forward(self, x):
        return (torch.tanh(x),)


def test_points_tell_whether_outputs_are_read():
    all_saved, *_ = curve_of(GivesTanh(), torch.ones(1024, requires_grad=True))
    assert all_saved.reads_outputs

"""A single process does not run the code that is for many."""

import contextlib
import os
import sys

import torch

import torchremat as tr
from torchremat import parallel

ROOM = os.path.dirname(parallel.__file__) + os.sep


@contextlib.contextmanager
def functions_entered():
    """The functions of `torchremat.parallel` that run in the block."""
    found = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOM):
            found.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def step(x):
    return x.sin().cos().sin().cos().sum()


def test_what_is_entered_is_noticed():
    with functions_entered() as found:
        tr.process_count()
    assert found[0] == "process_count"


def test_a_call_of_a_checkpoint():
    checkpointed = tr.checkpoint(step)
    x = torch.randn(8, requires_grad=True)
    with functions_entered() as found:
        for _ in range(2):
            checkpointed(x).backward()
    assert found == []


def test_a_budget():
    x = torch.randn(64, requires_grad=True)
    with functions_entered() as found:
        tr.checkpoint(step, policy=tr.checkpoint_policies.memory_budget("90%"))(x).backward()
        tr.plan(step, x, budget="90%")
    assert found == []

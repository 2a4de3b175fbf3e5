"""What a call reads and writes, seen on fake tensors."""

import torch

from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.report.observe import observe_saved


def test_observe_tells_what_is_written():
    counter, x = torch.zeros(3), torch.ones(3)

    def f(x):
        counter.add_(1)
        x.add_(1)
        return x.exp()

    written = {i.label.text for i in observe_saved(BoundCall(f, (x,), {})).inputs if i.is_written}
    assert written == {"x", "counter"}
    assert torch.equal(counter, torch.zeros(3))

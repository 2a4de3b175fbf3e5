"""`batching.segment_sum` takes lengths, as JAX's does."""

import pytest
import torch

from torchremat.batching import segment_sum
from torchremat.errors import SegmentError


def test_lengths_or_offsets():
    x = torch.arange(8.0)
    lengths, offsets = torch.tensor([3, 0, 1, 4]), torch.tensor([0, 3, 3, 4, 8])
    expected = [3.0, 0.0, 3.0, 22.0]
    assert segment_sum(x, lengths).tolist() == expected
    assert segment_sum(x, segment_lens=lengths).tolist() == expected
    assert segment_sum(x, lengths=lengths).tolist() == expected
    assert segment_sum(x, offsets=offsets).tolist() == expected


def test_one_of_them():
    with pytest.raises(SegmentError, match="is given 0"):
        segment_sum(torch.ones(3))
    with pytest.raises(SegmentError, match="is given 2"):
        segment_sum(torch.ones(3), torch.tensor([3]), offsets=torch.tensor([0, 3]))

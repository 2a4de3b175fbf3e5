from torch import Tensor

from torchremat.errors import SegmentError
from torchremat.kernels.segments import segments


def segment_sum(
    operand: Tensor,
    segment_lens: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The sums of segments that lie one after the other along the first dimension.

    Args:
        operand: `[total, ...]`, of a floating, complex or integer dtype.
        segment_lens: how many rows each segment has, `[num_segments]`; 0 for an empty one, whose
            sum is 0. Rows that are left belong to none.
        lengths: the same by PyTorch's name, as in `torch.segment_reduce`.
        offsets: in place of lengths, where each segment begins and the last one ends,
            `[num_segments + 1]`: `pile.offsets`, say.

    Returns:
        `[num_segments, ...]` of the dtype of `operand`. Halves are added up in float32.

    Raises:
        SegmentError: (a `ValueError`) for lengths that do not fit, or not just one of the three.
        SegmentTypeError: (a `TypeError`) for what is not a tensor, and for dtypes without a sum.

    It is one operator, with derivatives of every kind and order and a rule for `vmap`.

    >>> import torch
    >>> segment_sum(torch.arange(8.0), torch.tensor([3, 1, 4]))
    tensor([ 3.,  3., 22.])
    >>> segment_sum(torch.ones(3, 2), offsets=torch.tensor([0, 1, 3]))
    tensor([[1., 1.],
            [2., 2.]])
    """
    given = [x for x in (segment_lens, lengths, offsets) if x is not None]
    if len(given) != 1:
        raise SegmentError(
            "segment_sum takes segment_lens (or lengths, which are the same) or offsets, one of "
            f"them, and is given {len(given)}"
        )
    if offsets is not None:
        return segments.segment_sum(operand, offsets)
    return segments.segment_sum(operand, lengths=given[0])

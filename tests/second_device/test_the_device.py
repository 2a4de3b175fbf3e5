"""The device itself: what is not waited for is not there."""

import pytest
import torch


def test_operators_run_when_the_host_reads(late):
    x = torch.arange(6.0).to("late")
    y = (x * 2).sum()
    assert late.count_pending() > 0
    assert y.item() == 30
    assert late.count_pending() == 0


def test_a_copy_that_nobody_waited_for_is_not_there(late):
    late.show_copies_first(False)
    before = torch.full((4,), -1.0, device="late")
    assert before.sum().item() == -4
    del before
    host = torch.empty(4, pin_memory=True)
    side = torch.Stream("late")
    source = torch.full((4,), 3.0, device="late")
    with side:
        host.copy_(source, non_blocking=True)
    assert host.isnan().all()
    side.synchronize()
    assert host.tolist() == [-1.0] * 4  # it read the source before that was filled
    side.wait_stream(torch.accelerator.current_stream("late"))
    with side:
        host.copy_(source, non_blocking=True)
        event = side.record_event()
    event.synchronize()
    assert host.tolist() == [3.0] * 4


def test_memory_that_is_lent_again_is_no_number(late):
    x = torch.ones(1000, device="late")
    where = x.data_ptr()
    del x
    y = torch.empty(1000, device="late")
    assert y.data_ptr() == where
    assert y.isnan().all()


def test_a_copy_reads_what_its_source_is_when_it_runs(late):
    late.show_copies_first(False)
    host, side = torch.empty(4, pin_memory=True), torch.Stream("late")
    source = torch.full((4,), 3.0, device="late")
    side.wait_stream(torch.accelerator.current_stream("late"))
    with side:
        host.copy_(source, non_blocking=True)
    del source
    other = torch.full((4,), 5.0, device="late")
    assert other.sum().item() == 20
    side.synchronize()
    assert host.tolist() == [5.0] * 4  # the memory was freed, and lent again


def test_each_device_has_a_generator(late):
    before = late.get_rng_state("late:1")
    drawn = torch.rand(4, device="late:0").cpu()
    assert torch.equal(before, late.get_rng_state("late:1"))
    torch.manual_seed(0)
    assert torch.equal(torch.rand(4, device="late:0").cpu(), drawn)
    with pytest.raises(RuntimeError, match="a generator on late:0 is expected"):
        torch.rand(4, device="late:0", generator=torch.Generator("late:1"))


def test_an_error_in_an_operator_is_raised_where_the_host_waits(late):
    table = torch.ones(3, 2, device="late")
    rows = table[torch.tensor([7], device="late")]
    with pytest.raises(IndexError, match="out of bounds"):
        rows.cpu()

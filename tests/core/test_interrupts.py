"""Interrupts at any moment: no abort, nothing stays entered, and the next step is right."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import torchremat as tr
from torchremat.core.interrupts import InterruptedTrace, hold_interrupts, let_interrupts_in

PROGRAM = Path(__file__).with_name("interrupted_steps.py")
ROOT = PROGRAM.parents[2]


def interrupt_steps(num_interrupts, seed):
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(num_interrupts), str(seed)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return int(run.stdout.splitlines()[-1].split()[0])


def test_random_interrupts_leave_a_clean_state():
    assert interrupt_steps(12, seed=0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_many_random_interrupts_leave_a_clean_state(seed):
    assert interrupt_steps(100, seed) > 0


# --- when an interrupt comes ---------------------------------------------------------------------


class Alarm(Exception):
    """An `Exception`, as `TimeoutError`: those who catch any must not take it for a failure."""


@pytest.fixture
def ring():
    """Sends a signal whose handler raises `Alarm`."""

    def raise_alarm(_number, _frame):
        raise Alarm

    before = signal.signal(signal.SIGALRM, raise_alarm)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) is raise_alarm
    signal.signal(signal.SIGALRM, before)


def test_the_users_code_in_a_trace_is_interrupted_at_once(ring, tmp_path):
    def block(x):  # files, since the library undoes what a failed trace does to a list
        (tmp_path / "before").touch()
        ring()
        (tmp_path / "after").touch()
        return x.sin().cos()

    with pytest.raises(Alarm):
        tr.checkpoint(block)(torch.ones(2, requires_grad=True))
    assert [file.name for file in tmp_path.iterdir()] == ["before"]


def test_an_interrupted_search_for_a_plan_ends(ring, monkeypatch):
    from torchremat.planning.search.clock import WorkTimer

    charges = []

    def charge(timer, seconds):
        charges.append(seconds)
        if len(charges) == 3:
            ring_in_library()
        plain(timer, seconds)

    plain = WorkTimer.charge
    scope = {"ring": ring}
    exec(compile("def ring_in_library(): ring()", torch.__file__, "exec"), scope)
    ring_in_library = scope["ring_in_library"]
    monkeypatch.setattr(WorkTimer, "charge", charge)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.GELU())]
    model = tr.nn.wrap(torch.nn.Sequential(*layers), "budget:80%")
    with pytest.raises(Alarm):
        model(torch.ones(64, 8)).sum().backward()
    assert len(charges) == 3


def test_an_interrupt_waits_for_the_end_of_the_outermost_block():
    steps = []

    def note_and_raise(_number, _frame):
        steps.append("handler")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note_and_raise)
    library = {"signal": signal}
    code = "def send(): signal.raise_signal(signal.SIGINT)"
    exec(compile(code, torch.__file__, "exec"), library)
    try:
        with pytest.raises(KeyboardInterrupt), hold_interrupts():
            with hold_interrupts():
                library["send"]()
                steps.append("inner")
            steps.append("outer")
        assert steps == ["handler", "inner", "outer"]
        with pytest.raises(KeyboardInterrupt), hold_interrupts():
            library["send"]()
            with pytest.raises(InterruptedTrace):
                let_interrupts_in()
            let_interrupts_in()  # what cleans up is left alone
        let_interrupts_in()
        assert signal.getsignal(signal.SIGINT) is note_and_raise
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_the_block_sets_stays(ring):
    def mine(_number, _frame):
        pass

    before = signal.getsignal(signal.SIGALRM)
    with hold_interrupts():
        signal.signal(signal.SIGALRM, mine)
    assert signal.getsignal(signal.SIGALRM) is mine
    signal.signal(signal.SIGALRM, before)


def test_a_block_in_another_thread_leaves_handlers_alone(ring):
    before = signal.getsignal(signal.SIGALRM)

    def hold():
        with hold_interrupts():
            seen.append(signal.getsignal(signal.SIGALRM))

    seen = []
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [before]

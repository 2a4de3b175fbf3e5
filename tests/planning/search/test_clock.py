"""Work in place of time: one problem has one plan, whatever the machine does besides."""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import torchremat as tr
from tests.helpers import one_in
from tests.planning.models import GPT
from tests.planning.test_solver import layers, peak
from torchremat.planning import planner, solver
from torchremat.planning.search.clock import TimeSlice, WorkTimer
from torchremat.planning.search.incumbent import Incumbent
from torchremat.planning.solver import solve


@contextmanager
def busy_machine(count: int = 2) -> Iterator[None]:
    """Some processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def forget_plans() -> None:
    planner._solve.cache_clear()
    solver._find_least.cache_clear()


@pytest.mark.parametrize("budget", one_in(2, ["75%", "60%"]))
def test_a_busy_machine_makes_the_same_plan(budget):
    torch.manual_seed(0)
    model, tokens = GPT(), torch.randint(0, 64, (2, 32))
    forget_plans()
    alone = tr.plan(model, tokens, budget=budget).to_json()
    forget_plans()
    with busy_machine():
        assert tr.plan(model, tokens, budget=budget).to_json() == alone


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_clock_plays_no_part(monkeypatch, share):
    """Where each look at the clock is an hour later than the last, answers are the same."""
    problem = layers(8)
    budget = int(share * peak(problem))
    first = solve(problem, budget)
    forget_plans()
    hours = itertools.count(0, 3600)
    for name in ("monotonic", "perf_counter", "time", "thread_time", "process_time"):
        monkeypatch.setattr(time, name, lambda: float(next(hours)))
    assert solve(problem, budget) == first


def test_the_clock_plays_no_part_in_a_budget_of_added_time(monkeypatch):
    torch.manual_seed(0)
    model, tokens = GPT(), torch.randint(0, 64, (2, 32))
    forget_plans()
    first = tr.plan(model, tokens, budget="time:+5%").to_json()
    forget_plans()
    hours = itertools.count(0, 3600)
    for name in ("monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: float(next(hours)))
    assert tr.plan(model, tokens, budget="time:+5%").to_json() == first


def test_a_given_time_ends_a_search_by_the_clock_too():
    timed, free = WorkTimer(has_wall=True), WorkTimer()
    time.sleep(0.01)
    assert timed.now >= 0.01
    assert free.now == 0
    assert timed.within(-1.0).is_over
    assert not free.within(0.5).is_over
    free.charge(1.0)
    assert free.now == 1.0


def test_a_proof_that_none_adds_little_enough_ends_a_search():
    incumbent = Incumbent(TimeSlice(WorkTimer(), 1.0), gap=0.0, enough=1.0)
    incumbent.prove(0.9)
    assert not incumbent.is_decided
    assert not incumbent.is_near(0.1)
    incumbent.prove(1.1)
    assert incumbent.is_decided
    assert incumbent.is_good

"""A loop whose number of steps is unknown: an oscillator is fitted through an adaptive solver.

The solver halves and doubles its steps by the error of each. `tr.while_loop` saves a few of its
states, and runs steps again in the backward pass; plain Python saves what all steps make.

    python examples/21_loops_of_many_steps.py
    python examples/21_loops_of_many_steps.py --duration 60 --tolerance 1e-7
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import torchremat as tr
from torchremat.measure import LiveBytes


def make_step(damping: Tensor, duration: float, tolerance: float) -> Callable:
    """A step of Heun's method, which counts only if its error is small."""

    def slope(y: Tensor) -> Tensor:
        return torch.stack([y[1], -y[0] - damping * y[1]])

    def step(state):
        count, time, size, y = state
        size = torch.minimum(size, duration - time)
        first = slope(y)
        euler = y + size * first
        better = y + size / 2 * (first + slope(euler))
        error = (better - euler).abs().max().detach() * size
        counts = error <= tolerance
        return (
            count + 1,
            torch.where(counts, time + size, time),
            torch.where(counts, size * 1.5, size / 2),
            torch.where(counts, better, y),
        )

    return step


def solve(damping: Tensor, duration: float, tolerance: float, *, in_python: bool = False):
    """The number of steps, and where the oscillator is after `duration`."""
    y0 = torch.zeros(2, 1000, dtype=torch.double)
    y0[0] = torch.linspace(0.5, 1.5, 1000)
    zero, size = torch.zeros((), dtype=torch.double), torch.tensor(0.1, dtype=torch.double)
    state = (torch.tensor(0), zero, size, y0)
    step = make_step(damping, duration, tolerance)

    def goes_on(state):
        return state[1] < duration

    if in_python:
        while goes_on(state):
            state = step(state)
    else:
        state = tr.while_loop(goes_on, step, state)
    return state[0], state[3]


def fit(duration: float, tolerance: float, rounds: int, *, in_python: bool) -> Tensor:
    with torch.no_grad():
        _, observed = solve(torch.tensor(0.3).double(), duration, tolerance)
    damping = torch.tensor(0.1, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.Adam([damping], lr=0.03)
    with LiveBytes() as memory:
        for _ in range(rounds):
            optimizer.zero_grad()
            count, y = solve(damping, duration, tolerance, in_python=in_python)
            (y - observed).square().mean().backward()
            optimizer.step()
    way = "in Python" if in_python else "while_loop"
    print(
        f"{way}: damping {damping.item():.2f} after {rounds} rounds, "
        f"{count} steps in the last, peak {memory.peak / 2**20:.2f} MiB"
    )
    return damping.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--duration", type=float, default=5.0)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    found = [
        fit(options.duration, options.tolerance, options.rounds, in_python=in_python)
        for in_python in (True, False)
    ]
    print(f"equal but for rounding: {torch.allclose(*found, rtol=1e-9)}")


if __name__ == "__main__":
    main()

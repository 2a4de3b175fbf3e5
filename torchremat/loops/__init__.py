"""Loops whose backward pass saves few states: `while_loop` and `scan`.

    forward     0 . . . 4 . . . 8 . . . 12 . 14     the states that are saved change as it runs
    backward                             14 <- 15   each step runs again, the last one first,
                                   12 -> 13         from the saved state before it
                                     12 <- 13

Begin with `while_loop.py`. The user's functions run in `step.py`, whole loops in `runs.py`, with
the states that `snapshots.py` chooses. The derivative is in `loop_function.py`. Steps with tangents
and of batches are in `transformed_steps.py`.
"""

"""Budgets of functions that cannot be one graph: plans of what their tapes recorded.

Begin with `tape_budget.py`: a plan outlives a call. `tape_problem.py` makes numbers of a tape, and
`tape_plan.py` searches among them.
"""

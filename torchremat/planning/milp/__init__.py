"""Integer programs: rows for bytes are added until the simulated peak fits the budget.
It uses `problem`, and `search` to repair answers. Begin with `saving_program.py` for variables
and rows, then `row_generation.py`.
"""

"""Commands, one file each: read the arguments, call the library, show the result.
They may use `arguments` and `terminal` beside them. Begin with `run_plan.py`.
"""

"""Arguments of commands: the user's model, policies, budgets and selections.
Each reader returns an object of the library, or raises an error that names the option. It may
use `terminal` beside it. Begin with `targets.py`.
"""

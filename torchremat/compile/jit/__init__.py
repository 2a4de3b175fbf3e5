"""`jit`: a function compiled with its derivative, and inputs given away to it.
It uses the lowering beside it, and nothing of Dynamo. Begin with `jit.py`; `donation_plan.py`
decides which output takes which input's storage.
"""

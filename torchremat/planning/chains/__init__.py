"""Steps that are chains: of values, each computed from the one before, or of stages.

Begin with `chain.py`.
"""

"""Policies say which values may be saved; verdicts are their answers.

A policy is a value: it hashes, prints, combines with others and has a spelling. The room asks
about nodes of a joint graph, and knows nothing of the operator that checkpoints. Begin with
`policy.py`, then `builtin.py`.
"""

"""Values that users read about: their place in nested checkpoints, and their names.

The reports and the log print these names. It may use the other rooms of `remat`. Begin with
`scope.py`.
"""

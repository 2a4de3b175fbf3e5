"""Tiles: operators that are independent along rows run for some rows at a time.

Begin with `tile_joint.py`. `tile_rules.py` and `loss_rules.py` say of each operator how its rows
follow from those of its inputs, `growth.py` finds the operators, and `tiled_op.py` runs them.
"""

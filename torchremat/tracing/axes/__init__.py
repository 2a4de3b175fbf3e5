"""Named axes: the ones in scope, and functions run under a level of `vmap` with one.

Collectives such as `psum` look their axis up here. Begin with `named_axes.py`; the rules by which
`vmap` maps operators that PyTorch does not map rightly are in `mapped_operators.py`.
"""

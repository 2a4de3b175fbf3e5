"""Versions of PyTorch: which were tested, and what happens on one that lacks a private part.

`tested.py` has the versions, and `missing.py` what stands where a part is missing. `supplied.py`
imports the files of the room with that.
"""

"""The tape: a checkpoint of a function that cannot be one graph.

The function runs as it is, with real tensors, and a tape records its operators as they run. The
backward pass runs the tape, never Python. Begin with `taped_call.py`; `recorder.py` makes a tape,
`rerun.py` runs it.
"""

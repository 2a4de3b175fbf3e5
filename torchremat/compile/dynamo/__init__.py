"""The backend `"torchremat"` of `torch.compile`: AOTAutograd's joint graph, cut by a policy.
It uses nothing of `jit`. Begin with `backend.py`, then `partition.py`.
"""

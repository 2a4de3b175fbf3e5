"""The backend for `torch.compile`."""

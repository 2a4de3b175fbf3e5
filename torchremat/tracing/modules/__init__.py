"""What a trace knows of `nn.Module`s."""

"""What an operator costs on a device."""

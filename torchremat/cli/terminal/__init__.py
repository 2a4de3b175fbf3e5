"""What the command prints, and how it ends."""

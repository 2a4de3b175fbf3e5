"""What the command is given: targets, policies, budgets."""

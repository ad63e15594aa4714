"""A run's record on this machine: its folder, its metric lines, and why it failed."""

"""What stays of a run on this machine: its folder, its metric lines, and why it failed."""

"""The system monitor: what a host does while a run lasts."""

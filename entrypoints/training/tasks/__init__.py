"""What is learnt: losses, and one file a task."""

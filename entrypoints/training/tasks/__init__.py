"""What is learned: losses, and one file a task."""

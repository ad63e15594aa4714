"""What is learned: losses, and one file per task."""

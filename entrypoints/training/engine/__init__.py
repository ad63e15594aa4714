"""The loop that knows no task, its state, checkpoints and memory."""

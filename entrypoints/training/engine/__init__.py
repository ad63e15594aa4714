"""The task-independent training loop, its state, checkpoints and memory."""

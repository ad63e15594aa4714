"""What a run measures of itself: step timeline, system metrics, operators and kernels."""

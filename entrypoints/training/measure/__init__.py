"""What a run measures about itself: step timeline, system metrics, operators and kernels."""

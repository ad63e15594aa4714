"""Everything that knows SageMaker."""

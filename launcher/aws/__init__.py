"""Everything about SageMaker: request, validation, prices, upload, submission and following."""

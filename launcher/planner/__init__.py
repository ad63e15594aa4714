"""A job worked out in full, without effect: the plan, its validation, and the source package."""

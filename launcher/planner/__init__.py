"""A job worked out in full, without side effects: the plan, its validation, and the source package."""

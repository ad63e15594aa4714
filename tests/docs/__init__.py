"""The documents of this repository: what they say is what the code does."""

from tests import conftest  # noqa: F401  # puts entrypoints/ on the path, as the toolkit does

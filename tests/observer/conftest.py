"""Data workers of these tests have the same parent as those of tests/entrypoints, which sets how processes start for both."""

from tests.entrypoints.conftest import fork_server  # noqa: F401 - a fixture

"""A real run of two groups whose one serving host is too slow: the diagnosis names it, with the number of hosts to take."""

from __future__ import annotations

import importlib.util

import pytest

import launcher
from tests.conftest import assert_nothing_left
from tests.entrypoints.photographs import photographs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install -e '.[remote]'")


@pytest.fixture
def data(tmp_path):
    return tmp_path


def test_a_starved_run_is_told_to_take_more_servers(data):
    groups = [{"name": name, "instance_type": "ml.c5.large", "instance_count": 1} for name in ("gpus", "cpus")]

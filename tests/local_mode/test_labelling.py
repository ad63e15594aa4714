"""A label bank in containers, with a real engine: filled by one run, and read from its output by others."""

from __future__ import annotations

import pytest

import launcher
from tests.entrypoints.bank_runs import assert_a_bank_is_filled_and_learned_from, config_in
from tests.local_mode.conftest import IMAGE, assert_nothing_left


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hosts", [1, 2])
def test_containers_fill_a_bank_and_others_learn_from_it_with_their_teacher_and_without(engine, tmp_path, hosts):
    config = config_in(tmp_path, hosts, image={"uri": IMAGE})
    assert_a_bank_is_filled_and_learned_from(config, "docker")
    for run in launcher.runs():
        assert_nothing_left(run)

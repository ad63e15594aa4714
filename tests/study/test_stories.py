"""What KT's and Hyundai's figures say about scaling, against numbers worked out by hand from the stories."""

from __future__ import annotations

import pytest

import launcher
from launcher.commands import main
from launcher.study.stories import STORIES, efficiency_elsewhere, figures, story


def rows(name: str, section: int = 0) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in story(name).parts[section][2]}


def test_kts_29_times_are_16_times_the_gpus_and_something_else():
    """960 h / 300 epochs = 3.2 h; 24 h / 210 = 0.1143 h, which the story rounds to 0.11; 32 / 2 = 16; 3.2 / 0.1143 / 16 = 1.75."""
    found = rows("kt")
    assert found["whole speed-up, as published"] == ["29", "3.20 h / 0.11 h, both rounded"]
    assert found["whole speed-up"][0] == "28.0" and found["of it, more GPUs: at most"][0] == "16.0"
    assert found["what is left for each GPU: at least"] == ["1.75", "28.0 / 16; as published 1.81"]
    assert (
        found["the same at 93 % efficiency"][0] == "1.88" and found["of that, the larger batch: at most"][0] == "1.125"
    )
    told = str(story("kt"))
    assert "GPU-hours an epoch: 6.40 before, 3.66 after" in told and "175 % efficient: it cannot be" in told


def test_kts_log_waits_for_nine_tenths_of_a_step():
    """Forward 0.756634 s in the mean, backward 20.458134: a third of the computing is forward, 2.27 of 21.2154 s."""
    found = rows("kt", 1)
    assert [cells[0] for cells in found.values()] == ["0.76", "20.46", "1.51", "18.95"]
    assert "89 % of the step was" in str(story("kt")) and "9.3 times as fast" in str(story("kt"))


def test_hyundais_ten_times_are_at_most_five_instances():
    """57 / 6 = 9.5; 56.5 / 6.5 = 8.69 and 57.5 / 5.5 = 10.45 where both are rounded; a fifth of each."""
    found = rows("hyundai")
    assert found["whole speed-up"][0] == "9.5 (8.7 to 10.5)"
    assert found["left for each: at least"][0] == "1.90 (1.74 to 2.09)"
    assert found["of it, at the 93 % told: about"][0] == "4.68 to 4.79"
    assert found["left at that efficiency"][0] == "1.98 to 2.03"


@pytest.mark.parametrize(
    ("other", "by_bytes", "by_turns"),
    [(8, 0.93, 0.93), (5, 1 / (1 + 0.0752688 * 1.6 / 1.75), 1 / (1 + 0.0752688 * 8 / 14)), (1, 1.0, 1.0), (16, 0.9254, 0.8611)],
)  # fmt: skip
def test_an_efficiency_elsewhere_lies_between_bytes_and_turns(other, by_bytes, by_turns):
    assert efficiency_elsewhere(0.93, 8, other) == pytest.approx((by_bytes, by_turns), abs=1e-4)


@pytest.mark.parametrize("name", STORIES)
def test_a_story_says_what_it_explains_and_what_it_cannot(name, capsys):
    found = story(name)
    assert len(found.explained) >= 3 and len(found.open) >= 3 and "launcher study scaling configs/" in found.next
    assert "what they cannot tell" in str(found) and found._repr_html_().count("<table>") == 2
    assert all(change in " ".join(found.open) for change in figures()[name]["changes"])
    assert main.main(["study", "story", name]) == 0 and capsys.readouterr().out == f"{found}\n"
    assert launcher.study.story(name) == found


def test_another_story_is_none(capsys):
    assert main.main(["study", "story", "hyunday"]) == 2
    assert "did you mean hyundai?" in capsys.readouterr().err


def test_the_figures_are_the_stories():
    kt, hyundai = figures()["kt"], figures()["hyundai"]
    assert (kt["before"]["hours_an_epoch"], kt["after"]["hours_an_epoch"], kt["speed_up"]) == (3.20, 0.11, 29)
    assert (kt["after"]["gpus"], kt["after"]["epochs"], kt["after"]["hours"]) == (32, 210, 24)
    assert sum(kt["iterations"]["backward"]) == pytest.approx(102.29067) and len(kt["iterations"]["forward"]) == 5
    assert (hyundai["before"]["minutes_an_epoch"], hyundai["after"]["minutes_an_epoch"]) == (57, 6)
    assert (hyundai["efficiency"]["share"], hyundai["efficiency"]["gpus"]) == (0.93, 64)

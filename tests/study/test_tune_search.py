"""The search of a tuning over jobs whose speed is known for each number of workers: what it keeps, and how many trials that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from launcher.config.issues import UserError, mistake
from launcher.insight.findings import Finding, Fix
from launcher.record.records import RunFolder, write_json
from launcher.runner.run import Run
from launcher.study import tune_page
from launcher.study.tune_course import Course
from launcher.study.tune_result import Tuning
from launcher.study.tune_search import BudgetExhausted, Search, Trial
from launcher.study.tune_subject import CommandSubject


def finding(kind: str, **values: object) -> Finding:
    """One that asks for settings, each by a fix of its own."""
    fixes = tuple(Fix(setting=name, value=value) for name, value in values.items())
    return Finding(kind=kind, title=kind, share=0.5, evidence=(), cause="", fixes=fixes)


class Job:
    """A job that is measured in no time.

    Args:
        workers: as it is.
        each: seconds an image with a number of workers, at a trial's number from 1 on.
        limits: its findings with them.
        most: trials.
        waited: share of a step that waits for data with them.
    """

    def __init__(
        self,
        workers: int,
        each: Callable[[int, int], float],
        limits: Callable[[int], list[Finding]],
        most: int = 20,
        waited: Callable[[int], float] = lambda workers: 0.0,
    ):
        self.workers, self.each, self.limits, self.most, self.waited = workers, each, limits, most, waited
        self.tried: list[int] = []
        self.search = Search(CommandSubject(["python"], "it"), frozenset(), self, lambda first: None, lambda line: None)

    def __call__(self, changes: Mapping[str, int], label: str, steps: int | None = None) -> Trial:
        if spent := self.spent(1):
            raise BudgetExhausted(spent)
        workers = changes.get("num_workers", self.workers)
        self.tried.append(workers)
        trial = Trial(changes, Run(RunFolder(Path(f"trial-{len(self.tried)}"))))
        images = np.arange(20.0, 101, 10)
        trial.course = Course(images, 10 + images * self.each(workers, len(self.tried)))
        trial.losses = {1: 0.5}
        evidence = SimpleNamespace(
            script=None,
            workers=workers,
            world_size=1,
            cores_each=2.0,
            settings={},
            facts={"num_workers": workers},
            share=lambda phase: self.waited(workers) if phase == "data_wait" else None,
        )
        findings = tuple(self.limits(workers))
        trial.diagnosis = SimpleNamespace(
            findings=findings, evidence=evidence, report=SimpleNamespace(too_short=None), headline=""
        )
        return trial

    def spent(self, trials: int) -> str:
        return "" if len(self.tried) + trials <= self.most else "the trials are spent"

    def tuned(self) -> dict[str, int]:
        """The changes that are kept."""
        self.search.run()
        return dict(self.search.best[-1].changes)


def waits(workers: int) -> list[Finding]:
    """Each worker's reads take eight times the step."""
    return [finding("storage_bound", num_workers=2 * workers)] if workers < 8 else []


def test_a_number_is_raised_while_its_finding_stays_and_then_proven_once():
    job = Job(1, lambda workers, _: max(1.0, 8 / workers), waits)
    assert job.tuned() == {"num_workers": 8}
    assert job.tried == [1, 2, 4, 8, 1, 8]
    assert [step.kept for step in job.search.steps] == [False, False, True]
    assert "num_workers=4 is faster" in job.search.steps[0].why
    assert job.search.steps[-1].gain == pytest.approx(8) and job.search.ended == "no bottleneck is left"


def test_a_neighbour_that_is_faster_by_too_little_is_not_said_to_be_slower():
    job = Job(1, lambda workers, _: {1: 1.5, 2: 1.0, 4: 0.99, 8: 0.98}[workers], waits)
    assert job.tuned() == {"num_workers": 2}
    assert job.search.steps[1].why == "speed-up 1.52 in a single trial: not 2 % faster than num_workers=2"


def test_a_change_whose_trial_got_no_hosts_is_not_decided():
    class NoHosts(Job):
        def __call__(self, changes, label, steps=None):
            trial = super().__call__(changes, label, steps)
            if changes:
                trial.failed, trial.began = "CapacityError", False
            return trial

    job = NoHosts(4, lambda workers, _: 8 / workers, waits)
    assert job.tuned() == {}
    assert [(step.verdict, step.why) for step in job.search.steps] == [("not decided", "it failed: CapacityError")]


@pytest.mark.parametrize("began", [True, False])
def test_a_proof_whose_repeat_got_no_hosts_is_not_decided(began):
    class NoHostsLater(Job):
        def __call__(self, changes, label, steps=None):
            trial = super().__call__(changes, label, steps)
            if label == "the fastest so far again":
                trial.failed, trial.began = "CapacityError", began
            return trial

    job = NoHostsLater(4, lambda workers, _: 8 / workers, waits)
    assert job.tuned() == {}
    [step] = job.search.steps
    assert step.verdict == ("rolled back" if began else "not decided")


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("removed", [2, 3])
def test_a_proof_whose_trial_was_removed_does_not_show_the_same_losses(allowed, removed):
    class Removed(Job):
        def __call__(self, changes, label, steps=None):
            trial = super().__call__(changes, label, steps)
            if len(self.tried) == removed:
                trial.losses = None
            return trial

    job = Removed(4, lambda workers, _: 8 / workers, waits)
    job.search.allowed = frozenset(["num_workers"] if allowed else [])
    assert job.tuned() == ({"num_workers": 8} if allowed else {})
    [step] = job.search.steps
    assert step.losses == "losses not compared: a trial's run was removed" and not step.same_losses
    assert step.verdict == ("kept" if allowed else "not decided") and (step.why == step.losses) is not allowed
    assert "losses not compared" in tune_page.fragment("it", [], [], [step], lambda picture: picture)


def test_a_change_to_a_script_without_a_seed_is_kept_and_said_to_be_not_compared():
    class Unseeded(Job):
        def __call__(self, changes, label, steps=None):
            trial = super().__call__(changes, label, steps)
            trial.losses = {1: [2.31, 2.52, 2.35, 2.44][len(self.tried) - 1]}
            return trial

    job = Unseeded(4, lambda workers, _: 8 / workers, waits)
    assert job.tuned() == {"num_workers": 8}
    [step] = job.search.steps
    said = "losses not compared: two runs of the same settings differ from the first loss on; set a seed if it has none"
    assert step.losses == said and said in tune_page.fragment("it", [], [], [step], lambda picture: picture)
    assert f"num_workers=8: {said}" in Tuning(job.search.subject, Path("trials.csv"), job.search, None).sentences()


@pytest.mark.parametrize(
    ("orders", "ranks", "kept", "said"),
    [
        (
            ["2.1 2.9", "2.1 2.9", "2.1 2.9", "2.9 2.1"],
            2,
            True,
            "the same losses in 2 logged steps, to the digits printed",
        ),
        (
            ["2.1 2.9", "2.1 2.9", "2.1 2.9", "2.1 2.9"],
            2,
            True,
            "the same losses in 4 logged steps, to the digits printed",
        ),
        (["2.1 2.9", "2.1 2.8", "2.1 2.9", "2.1 2.8"], 2, False, "other losses, first at step 4: 2.8 instead of 2.9"),
        (["2.1 2.9", "2.1 2.9", "2.1 2.9", "2.9 2.1"], 1, False, "other losses, first at step 1: 2.9 instead of 2.1"),
    ],
)
def test_losses_that_several_processes_print_in_another_order_are_not_other_losses(orders, ranks, kept, said, tmp_path):
    class Printed(Job):
        def __call__(self, changes, label, steps=None):
            trial = super().__call__(changes, label, steps)
            del trial.losses
            trial.diagnosis.evidence.world_size = ranks
            trial.run = Run(RunFolder(tmp_path / f"trial-{len(self.tried)}"))
            trial.run.folder.log("algo-1").parent.mkdir(parents=True)
            plan = {"name": "it", "planned": "2026-01-01T00:00:00+00:00", "backend": "watch", "job": {"name": "it"}}
            write_json(trial.run.folder.plan, {**plan, "hosts": [{"name": "algo-1"}]})
            write_json(trial.run.folder.outcome, {"state": "Completed"})
            lines = [f"loss: {loss}\n" for loss in ("2.1 2.9 " + orders[len(self.tried) - 1]).split()]
            trial.run.folder.log("algo-1").write_text("".join(lines if ranks > 1 else lines[2:]))
            return trial

    job = Printed(4, lambda workers, _: 8 / workers, waits)
    assert bool(job.tuned()) is kept
    assert job.search.steps[0].losses.startswith(said)


def test_an_allowed_setting_that_no_finding_asks_for_is_said_to_change_nothing():
    job = Job(1, lambda workers, _: 8 / workers, waits, most=1)
    job.search.allowed = frozenset(["num_workers", "channels_last"])
    job.tuned()
    said = Tuning(job.search.subject, Path("trials.csv"), job.search, None).sentences()
    assert [line for line in said if line.startswith("--allow")] == [
        "--allow channels_last changed nothing: no finding asked for it"
    ], "the budget, not the findings, left out the workers"


@pytest.mark.parametrize("waited, tried", [(0.05, [1, 4, 8, 1, 8]), (0.01, [1, 4, 1, 4])])
def test_a_wait_that_is_no_finding_any_more_is_worth_a_look_beyond(waited, tried):
    """With four workers a step waits for less than a finding takes; with eight it waits for nothing."""
    job = Job(
        1,
        lambda workers, _: max(1.0, 4.2 / workers),
        lambda workers: [finding("storage_bound", num_workers=4)] if workers < 4 else [],
        waited=lambda workers: waited if workers == 4 else 0.0,
    )
    assert job.tuned() == {"num_workers": tried[-1]} and job.tried == tried


@pytest.mark.parametrize("kind", ["too_few_workers", "storage_bound"])
def test_what_asks_for_more_gets_no_trial_of_less(kind):
    job = Job(0, lambda workers, _: 2 - min(workers, 2) / 2, lambda workers: [finding(kind, num_workers=2)])
    assert job.tuned() == {"num_workers": 2} and job.tried == [0, 2, 4, 0, 2]


def test_what_asks_for_less_gets_no_trial_of_more():
    cost = {16: 2.0, 4: 1.2, 2: 1.0, 1: 1.1}
    job = Job(16, lambda workers, _: cost[workers], lambda workers: [finding("too_many_workers", num_workers=4)])
    assert job.tuned() == {"num_workers": 2} and job.tried == [16, 4, 2, 1, 16, 2]


def test_a_loader_without_workers_gets_some_where_its_reads_take_long():
    """The finding's own fixes are none that can be set."""
    job = Job(0, lambda workers, _: 1 / (1 + workers), lambda workers: [] if workers else [finding("storage_bound")])
    assert job.tuned() == {"num_workers": 2} and job.tried == [0, 2, 0, 2]


def test_numbers_around_one_that_helped_are_tried_where_its_finding_stays():
    """The finding asks for one worker, and four are best."""
    cost = {0: 1.5, 1: 1.3, 2: 1.1, 4: 1.02, 8: 1.4, 16: 2.0}
    job = Job(16, lambda workers, _: cost[workers], lambda workers: [finding("data_bound", num_workers=1)])
    assert job.tuned() == {"num_workers": 4} and job.tried == [16, 1, 0, 4, 2, 8, 16, 4]


def test_no_number_is_tried_between_near_ones():
    job = Job(1, lambda workers, _: 2 / min(workers, 2), lambda workers: [finding("data_bound", num_workers=2)])
    assert job.tuned() == {"num_workers": 2} and job.tried == [1, 2, 4, 1, 2]


def test_a_change_that_is_no_faster_takes_a_single_trial():
    job = Job(2, lambda workers, _: 1.0, lambda workers: [finding("too_few_workers", num_workers=4)])
    assert job.tuned() == {} and job.tried == [2, 4]
    assert job.search.steps[0].why == "speed-up 1.00 in a single trial: not 2 % faster"
    assert job.search.ended == "no allowed change helps with the bottleneck that is left"


@pytest.mark.parametrize("again", [1.0, 0.99])
def test_what_was_fast_by_luck_is_rolled_back(again):
    """Only its first trial is much faster."""
    costs = {2: 0.8, 4: again}
    job = Job(2, lambda workers, trial: costs.get(trial, 1.0), lambda workers: [finding("risky", num_workers=4)])
    assert job.tuned() == {} and job.tried == [2, 4, 2, 4]
    assert not job.search.steps[0].kept and job.search.steps[0].decided


def test_what_was_slow_by_chance_as_it_is_keeps_no_change():
    """A first run that reads its files from the disk."""
    job = Job(2, lambda workers, trial: 2.0 if trial == 1 else 1.0, lambda workers: [finding("risky", num_workers=4)])
    assert job.tuned() == {}


@pytest.mark.parametrize("first, changed, kept", [(2.0, 0.995, {}), (1.1, 0.995, {}), (2.0, 0.9, {"num_workers": 4})])
def test_a_slow_first_run_does_not_count_half_where_there_are_two(first, changed, kept):
    def each(workers: int, trial: int) -> float:
        return first if trial == 1 else changed if workers == 4 else 1.0

    job = Job(2, each, lambda workers: [finding("risky", num_workers=4)])
    assert job.tuned() == kept and job.tried == [2, 4, 2, 4]
    [step] = job.search.steps
    assert step.gain == pytest.approx(1 / changed)


@pytest.mark.parametrize("most, kept", [(3, {}), (4, {"num_workers": 2}), (5, {"num_workers": 4})])
def test_the_last_trials_of_a_budget_prove_what_was_found(most, kept):
    job = Job(1, lambda workers, _: max(1.0, 8 / workers), waits, most)
    assert job.tuned() == kept and len(job.tried) == most
    assert job.search.ended == "the trials are spent" and not job.search.steps[-1].decided


def test_a_change_whose_proof_the_budget_cuts_off_is_not_decided():
    """An earlier call paid for more than the trials so far: a neighbour is refused although looking ahead allowed it."""

    class Paid(Job):
        def spent(self, trials: int) -> str:
            return super().spent(trials) if trials == 1 else ""

    job = Paid(1, lambda workers, _: max(1.0, 8 / workers), waits, most=3)
    assert job.tuned() == {} and job.tried == [1, 2, 4]
    found = [(step.proposal.value, step.verdict, step.why) for step in job.search.steps]
    assert found[0][1] == "rolled back" and "num_workers=4 is faster" in found[0][2]
    assert found[1:] == [(4, "not decided", "the trials are spent"), (8, "not decided", "the trials are spent")]


class Refused(Job):
    """One whose trials AWS refuses from a number on."""

    first_refused = 0

    def __call__(self, changes, label, steps=None):
        if len(self.tried) + 1 >= self.first_refused:
            raise mistake("start", "ResourceLimitExceeded", "ask for more")
        return super().__call__(changes, label, steps)


@pytest.mark.parametrize(
    ("first_refused", "kept", "undecided"),
    [(2, {}, "num_workers=2"), (6, {}, "num_workers=8"), (7, {"num_workers": 8}, "pin_memory=true")],
)
def test_an_error_at_a_later_trial_ends_the_search_with_what_was_found(first_refused, kept, undecided, tmp_path):
    pin = finding("host_to_device_bound", pin_memory=True)
    job = Refused(1, lambda workers, _: max(1.0, 8 / workers), lambda workers: waits(workers) or [pin])
    job.first_refused = first_refused
    assert job.tuned() == kept
    assert job.search.ended == "start: ResourceLimitExceeded; ask for more" and job.search.cut_off
    assert [str(step.proposal) for step in job.search.steps if not step.decided] == [undecided]
    found = Tuning(job.search.subject, tmp_path / "trials.csv", job.search, None)
    assert f"{undecided}: not decided; the same command continues" in found.sentences() and not found.failed
    assert "ended: start: ResourceLimitExceeded" in str(found)


def test_an_error_at_the_first_trial_is_raised():
    job = Refused(1, lambda workers, _: 1.0, waits)
    with pytest.raises(UserError, match="ResourceLimitExceeded"):
        job.search.run()


def test_a_budget_that_is_spent_before_the_first_trial_is_what_is_said(tmp_path):
    job = Job(1, lambda workers, trial: 1.0, lambda workers: [], most=0)
    job.search.run()
    found = Tuning(job.search.subject, tmp_path / "trials.csv", job.search, None)
    assert found.failed and str(found) == job.search.ended and "spent" in job.search.ended and found.limit == ""
    assert repr(found) == "<tuning of it: the trials are spent>"
    found.save_html(tmp_path / "why.html")
    for part in ("first", "comparison"):
        with pytest.raises(UserError, match="spent"):
            getattr(found, part)

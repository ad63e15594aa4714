"""A job's cost: the ceiling before, the spend while it runs, the bill after, and prices from AWS's price list and from this kit."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.aws import catalog, prices
from launcher.backends.supervisor import GRACE_SECONDS
from launcher.emulator import Emulator
from launcher.planner.plan import STOP_SECONDS, refuse_cost
from tests.aws.jobs import GROUPED, P4D, changed
from tests.emulator.conftest import Aws

REGION = "eu-central-1"
"""Of which the kit has no price."""

TODAY = f"{datetime.now(timezone.utc):%Y-%m-%d}"
REQUEST: dict = {"EnableManagedSpotTraining": False}
SPOT = {"EnableManagedSpotTraining": True}


@pytest.fixture(scope="module")
def price_list(tmp_path_factory):
    """A client of AWS's Price List which knows a few prices."""
    with Emulator(tmp_path_factory.mktemp("emulator")) as emulator:
        emulator.set_price(P4D, 32.77, REGION)
        emulator.set_price(P4D, 40.1, "eu-west-1")
        emulator.set_price("ml.c5.4xlarge", 0.816, REGION)
        yield Aws(emulator.environment).client("pricing", prices.PRICE_LIST_REGION)


def price(values: dict, **changes):
    return prices.price(launcher.from_values(changed(values, {"region": REGION, **changes})))


def keep(known: dict) -> None:
    prices.cache_file().parent.mkdir(parents=True, exist_ok=True)
    prices.cache_file().write_text(json.dumps(known))


# -- the ceiling ------------------------------------------------------------------------------------------------------


def test_without_a_price_the_plan_says_how_to_know_it(good):
    unknown = price(good)
    assert (unknown.per_hour, unknown.ceiling) == (None, None)
    assert f"price not known for {P4D}: launcher plan --check" in unknown.text and "price_per_hour" in unknown.text


def test_without_a_region_there_is_no_price(good):
    values = {name: value for name, value in good.items() if name != "region"}
    assert prices.price(launcher.from_values(values)).text == "price not known: no region"


def test_a_job_without_an_instance_type_has_no_price_and_reports_what_is_missing(good):
    plan = launcher.plan(launcher.from_values(changed(good, {"compute": {}})), on="aws")
    assert plan.price.ceiling is None
    assert "compute.instance_type" in [issue.key for issue in plan.errors]


def test_a_price_of_ones_own_is_that_of_one_host(good):
    own = price(good, **{"compute.price_per_hour": 10.0, "compute.max_hours": 3.0, "compute.instance_count": 4})
    assert own.per_hour == 40
    assert own.text.startswith("at most $121.33: 3 h and 2 min to stop at $40.00 an hour (compute.price_per_hour)")


def test_a_job_that_reaches_its_time_limit_stays_below_the_ceiling_until_it_uploads(good):
    """SIGTERM comes at max_hours, SIGKILL 120 s later, both on the bill."""
    full = price(good, **{"compute.price_per_hour": 3600.0, "compute.max_hours": 1.0, "compute.instance_count": 3})
    assert full.ceiling == pytest.approx(3600 * 3 * (1 + 120 / 3600))
    assert full.text.endswith("(compute.price_per_hour), and the upload of its results after that")
    assert STOP_SECONDS == GRACE_SECONDS, "as a run on this machine"


def test_a_processing_job_beside_the_training_is_named_and_free_rules_are_not(good):
    priced = {"compute.price_per_hour": 10.0}
    profiled = price(good, **priced, profiling={"profiler": {"cpu_seconds": 60}})
    assert profiled.ceiling == price(good, **priced).ceiling
    assert profiled.text.endswith(" after that, and SageMaker Profiler's processing job (ml.m5.4xlarge)")
    assert "processing job" not in price(good, **priced, profiling={"rules": {"ProfilerReport": {}}}).text


def test_a_warm_pool_is_paid_after_the_job(good):
    warm = price(good, **{"compute.price_per_hour": 10.0, "compute.max_hours": 1.0, "compute.keep_alive_minutes": 30})
    assert warm.ceiling == pytest.approx(20 * (1 + 2 / 60 + 30 / 60))
    assert "1 h, 2 min to stop and 30 min of warm pool" in warm.text


def test_spot_has_the_ceiling_of_on_demand_and_says_that_it_costs_less(good):
    plain = {"compute.price_per_hour": 10.0}
    spot = price(good, **plain, **{"compute.spot": True})
    assert spot.ceiling == price(good, **plain).ceiling
    assert spot.text.endswith("; spot costs less") and "spot" not in price(good, **plain).text


def test_a_training_plan_is_said_to_be_paid_for(good):
    plan = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/mine"
    planned = price(good, **{"compute.price_per_hour": 10.0, "compute.training_plan": plan})
    assert planned.text.endswith("; what compute.training_plan covers was paid for with the plan")


def test_waiting_for_spot_costs_nothing(good):
    spot = {"compute.price_per_hour": 10.0, "compute.spot": True, "compute.max_hours": 1.0}
    waits = price(good, **spot, **{"compute.max_wait_hours": 20.0})
    assert waits.ceiling == price(good, **spot).ceiling == pytest.approx(20 * (1 + 2 / 60))


def test_the_prices_of_groups_are_added(good):
    keep({REGION: {P4D: {"usd": 32.0, "read": "2026-11-02"}, "ml.c5.4xlarge": {"usd": 0.8, "read": "2026-10-01"}}})
    grouped = price(good, compute={**GROUPED, "max_hours": 2.0})
    assert grouped.per_hour == pytest.approx(2 * 32 + 0.8)
    assert grouped.ceiling == pytest.approx((2 + 2 / 60) * grouped.per_hour)
    assert "AWS's price list of 2026-10-01" in grouped.text


def test_one_unknown_group_makes_the_price_unknown(good):
    keep({REGION: {P4D: {"usd": 32.0, "read": "2026-11-02"}}})
    grouped = price(good, compute=GROUPED)
    assert grouped.ceiling is None and "ml.c5.4xlarge" in grouped.text and P4D not in grouped.text


def test_groups_of_one_type_are_hosts_of_one_type(good):
    groups = [{"name": name, "instance_type": P4D, "instance_count": count} for name, count in (("a", 1), ("b", 2))]
    job = launcher.from_values(changed(good, {"compute": {"instance_groups": groups}}))
    assert prices.instances(job) == {P4D: 3}


def test_a_price_of_another_region_does_not_count(good):
    keep({"eu-west-1": {P4D: {"usd": 40.0, "read": "2026-11-02"}}})
    assert price(good).ceiling is None
    assert price(good, region="eu-west-1").per_hour == 80


@pytest.mark.parametrize("text", ["", "not json", "[]", "null", '"x"'])
def test_a_broken_cache_is_no_cache(good, text):
    prices.cache_file().parent.mkdir(parents=True, exist_ok=True)
    prices.cache_file().write_text(text)
    assert price(good).ceiling is None


# -- prices that come with the kit -------------------------------------------------------------------------------------


class Later(datetime):
    """A day on which every price of today is old."""

    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + timedelta(days=prices.OLD_DAYS + 1)


def test_a_price_that_comes_with_the_kit_needs_no_network_and_says_its_day(good):
    known = price(good, region="us-east-1", **{"compute.max_hours": 10.0, "compute.instance_count": 4})
    assert known.per_hour == pytest.approx(4 * 25.251) and known.ceiling == pytest.approx(1013.4068)
    assert "AWS's price list of 2026-09-04, as public sources have it" in known.text
    grouped = launcher.from_values(changed(good, {"region": "us-east-1", "compute": GROUPED}))
    assert prices.of_groups(grouped) == {"gpus": pytest.approx(2 * 25.251), "cpus": 0.816}


def test_max_cost_is_obeyed_offline(good):
    values = changed(good, {"region": "us-east-1", "compute.max_hours": 10.0, "compute.instance_count": 4})
    planned = launcher.plan(launcher.from_values(values), on="aws")
    refuse_cost(planned, 1013.41)
    with pytest.raises(launcher.UserError, match=r"at most \$1,013.41: 10 h and 2 min to stop"):
        refuse_cost(planned, 1013.40)


def test_an_old_price_warns(good, monkeypatch):
    known = json.dumps({REGION: {P4D: {"usd": 32.0, "read": TODAY}}})
    keep(json.loads(known))
    assert "WARNING" not in price(good).text
    monkeypatch.setattr(prices, "datetime", Later)
    assert (
        f"price list of {TODAY}; WARNING: 91 days old, launcher plan --check fetches the current one"
        in price(good).text
    )
    assert "as public sources have it; WARNING: " in price(good, region="us-east-1").text


@pytest.mark.parametrize(("read", "usd"), [("2026-09-03", 25.251), ("2026-09-04", 26.0), ("2026-11-02", 26.0)])
def test_of_the_kits_price_and_one_that_was_read_here_the_newer_counts(good, read, usd):
    keep({"us-east-1": {P4D: {"usd": 26.0, "read": read}}})
    assert price(good, region="us-east-1").per_hour == pytest.approx(2 * usd)


def test_an_emulator_has_no_price_of_the_kit(good, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:5000")
    assert price(good, region="us-east-1").ceiling is None


def test_every_price_of_the_kit_has_a_source_and_a_day_and_is_one_of_a_type_that_there_is():
    parts = yaml.safe_load(Path(prices.__file__).with_name("prices.yaml").read_text())
    seen = Counter((part["region"], name) for part in parts for name in part["usd"])
    assert max(seen.values()) == 1 and {region for region, _ in seen} == {"us-east-1", "us-west-2"}
    for part in parts:
        assert {*part} == {"region", "as_of", "source", "usd"}
        assert part["source"].startswith("https://") and date(2026, 1, 1) < part["as_of"] <= date.today()
        for name, usd in part["usd"].items():
            assert catalog.instance(name) is not None and 0.05 < usd < 200, name


# -- AWS's price list -------------------------------------------------------------------------------------------------


def test_a_price_is_read_once_and_kept_with_its_date(good, price_list):
    assert prices.read_price_list(price_list, REGION, [P4D]) == {P4D: 32.77}
    assert json.loads(prices.cache_file().read_text()) == {REGION: {P4D: {"usd": 32.77, "read": TODAY}}}
    known = price(good, **{"compute.max_hours": 10.0})
    assert (known.per_hour, known.ceiling) == (65.54, pytest.approx(65.54 * (10 + 2 / 60)))
    assert f": 10 h and 2 min to stop at $65.54 an hour (AWS's price list of {TODAY})" in known.text


def test_a_second_look_adds_to_the_first(price_list):
    prices.read_price_list(price_list, REGION, [P4D])
    prices.read_price_list(price_list, "eu-west-1", [P4D])
    assert prices.read_price_list(price_list, REGION, ["ml.c5.4xlarge"]) == {"ml.c5.4xlarge": 0.816}
    kept = json.loads(prices.cache_file().read_text())
    assert {region: set(names) for region, names in kept.items()} == {
        REGION: {P4D, "ml.c5.4xlarge"},
        "eu-west-1": {P4D},
    }


def test_a_newer_price_takes_the_place_of_an_older_one(good, price_list):
    keep({REGION: {P4D: {"usd": 1.0, "read": "2020-01-01"}}})
    assert "2020-01-01" in price(good).text
    prices.read_price_list(price_list, REGION, [P4D])
    assert price(good).per_hour == 65.54


def test_the_prices_of_an_emulator_are_not_kept_as_those_of_aws(good, price_list, monkeypatch):
    with monkeypatch.context() as emulated:
        emulated.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:5000")
        prices.read_price_list(price_list, REGION, [P4D])
        assert f"http://127.0.0.1:5000's price list of {TODAY}" in price(good).text
    assert "price not known" in price(good).text


def test_what_the_list_does_not_hold_is_left_out_and_nothing_is_written(price_list):
    assert prices.read_price_list(price_list, "sa-east-1", [P4D]) == {}
    assert not prices.cache_file().exists()


def test_ones_own_price_wins_over_the_list(good, price_list):
    prices.read_price_list(price_list, REGION, [P4D])
    assert price(good, **{"compute.price_per_hour": 5.0}).per_hour == 10


# -- the bill ---------------------------------------------------------------------------------------------------------


def test_the_bill_counts_billable_seconds_of_all_hosts():
    described = {"BillableTimeInSeconds": 1800, "TrainingTimeInSeconds": 1800}
    assert prices.bill(REQUEST, 65.54, described) == {
        "billable_seconds": 1800,
        "training_seconds": 1800,
        "cost_usd": 32.77,
    }


def test_the_bill_of_a_spot_job_holds_the_saving():
    described = {"BillableTimeInSeconds": 300, "TrainingTimeInSeconds": 1000}
    assert prices.bill(SPOT, 36.0, described) == {
        "billable_seconds": 300,
        "training_seconds": 1000,
        "cost_usd": 3.0,
        "saving": 0.7,
    }


@pytest.mark.parametrize(
    ("request_", "per_hour", "described", "bill"),
    [
        (REQUEST, None, {"BillableTimeInSeconds": 60}, {"billable_seconds": 60}),
        (REQUEST, 3.6, {}, {}),
        (SPOT, None, {"BillableTimeInSeconds": 0, "TrainingTimeInSeconds": 0}, {"billable_seconds": 0, "training_seconds": 0}),
        (SPOT, 3.6, {"BillableTimeInSeconds": 0, "TrainingTimeInSeconds": 9}, {"billable_seconds": 0, "training_seconds": 9, "cost_usd": 0.0, "saving": 1.0}),
    ],
)  # fmt: skip
def test_the_bill_says_only_what_is_known(request_, per_hour, described, bill):
    assert prices.bill(request_, per_hour, described) == bill


@pytest.mark.parametrize(
    ("status", "known"), [("Terminated", True), ("Reused", True), ("Available", False), ("InUse", False)]
)
def test_the_bill_holds_a_warm_pool_once_its_hosts_are_gone(status, known):
    pool = {"Status": status, "ResourceRetainedBillableTimeInSeconds": 3600}
    bill = prices.bill(REQUEST, 36.0, {"BillableTimeInSeconds": 1800, "WarmPoolStatus": pool})
    apart = {"warm_pool_seconds": 3600, "warm_pool_usd": 36.0} if known else {}
    assert bill == {"billable_seconds": 1800, "cost_usd": 18.0, **apart}


def test_the_spend_grows_from_the_start_of_training():
    start = datetime.now(timezone.utc) - timedelta(hours=2)
    assert prices.so_far(10.0, {"TrainingStartTime": start.isoformat()}) == pytest.approx(20, abs=0.1)


def test_the_spend_stops_with_the_training():
    times = {"TrainingStartTime": "2026-11-21T10:00:00+00:00", "TrainingEndTime": "2026-11-21T12:30:00+02:00"}
    assert prices.so_far(10.0, times) == 5


@pytest.mark.parametrize(
    ("per_hour", "described"), [(None, {"TrainingStartTime": "2026-11-21T10:00:00+00:00"}), (1.0, {})]
)
def test_without_price_or_start_there_is_no_spend(per_hour, described):
    assert prices.so_far(per_hour, described) is None


def test_a_clock_that_is_behind_gives_no_negative_spend():
    later = datetime.now(timezone.utc) + timedelta(minutes=5)
    assert prices.so_far(10.0, {"TrainingStartTime": later.isoformat()}) == 0

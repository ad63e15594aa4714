"""The run store: found by name, in order, told where it is damaged; and how a terminal shows what a run left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

import launcher
from launcher.commands import main
from launcher.record import records
from launcher.record.records import RunFolder
from launcher.runner.start_record import STARTING, installed_versions
from launcher.show.terminal import neutralised
from tests.conftest import ROOT

ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[1A\x9b5n\x1bP1$r\x1b\\\x08\x7f"
COLOURED = "\x1b[31mred\x1b[0m\tgrün \x1b[1;38:5:2mx\x1b[m"


def recorded(
    name: str, *, planned: str = "2026-11-22T10:00:00.000000+00:00", state: str = "Completed", **plan
) -> RunFolder:
    """A run folder as a local run leaves it, with a log of one line."""
    run = RunFolder(records.store() / name)
    (run.path / "logs").mkdir(parents=True)
    values = {
        "name": name,
        "planned": planned,
        "backend": "process",
        "job": {"name": run.job_name},
        "hosts": [{"name": "algo-1"}],
    }
    run.plan.write_text(json.dumps({**values, **plan}))
    if state:
        run.outcome.write_text(json.dumps({"state": state, "seconds": 1.0}))
    run.log("algo-1").write_text("a line\n")
    return run


def test_runs_are_in_the_order_of_their_start_whatever_their_names():
    later = recorded("b-20261122-100001-aaaa")
    first = recorded("z-20261122-100000-aaaa", planned="2026-11-22T10:00:00.500000+00:00")
    second = recorded("a-20261122-100000-zzzz", planned="2026-11-22T10:00:00.900000+00:00")
    adopted = recorded("pytorch-training-2026", planned="2026-11-22T10:00:00.700000+00:00")
    assert [run.name for run in records.all_runs()] == [run.name for run in (first, adopted, second, later)]


def test_a_name_finds_its_run_and_a_jobs_name_its_latest():
    runs = [
        recorded(f"some-job-2026112{day}-100000-aaaa", state=state)
        for day, state in enumerate(("Completed", "Failed"), 1)
    ]
    adopted = recorded("of-another-program")
    assert records.find(runs[0].name) == runs[0] and records.find("some-job") == runs[1]
    assert records.find("some-job", completed=True) == runs[0] and records.find("of-another-program") == adopted
    with pytest.raises(launcher.UserError, match="did you mean some-job"):
        records.find("some-jbo")
    with pytest.raises(launcher.UserError, match="none of 1 run has completed; the latest is Failed"):
        recorded("failing-20261122-100000-aaaa", state="Failed")
        records.find("failing", completed=True)
    for name in ("..", "../store", "", ".", "some-job/../some-job-20261121-100000-aaaa"):
        with pytest.raises(launcher.UserError, match="no such run"):
            records.find(name)


def test_a_link_in_the_store_is_no_run_and_a_name_longer_than_a_files_finds_none(capsys):
    run = recorded("job-20261122-100000-aaaa")
    link = run.path.with_name("job-20261122-100001-aaaa")
    link.symlink_to(run.path)
    assert [one.name for one in launcher.runs()] == [run.name] and records.find("job") == run
    assert main.main(["rm", link.name, "--yes"]) == 2
    assert f"{link.name}: a link, and no run" in capsys.readouterr().err and link.is_symlink()
    for name in ("x" * 300, "job-20261122-100000-aaaa/" + "x" * 300):
        assert main.main(["show", name]) == 2
        assert "no such run" in capsys.readouterr().err


def test_a_link_that_leads_to_itself_is_a_damaged_outcome_also_of_a_run_on_sagemaker():
    run = recorded("job-20261122-100000-aaaa", state="", backend="aws")
    run.remote.write_text('{"TrainingJobStatus": "Completed"}')
    run.outcome.symlink_to(run.outcome)
    with pytest.raises(records.DamagedRecord, match="outcome.json: Too many levels of symbolic links"):
        run.state()


def test_a_run_that_is_being_started_is_not_shown_yet_and_one_whose_start_broke_off_is_reported(capsys):
    run = RunFolder(records.store() / "young-20261122-100000-aaaa")
    run.path.mkdir(parents=True)
    with open(run.lock, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launcher.runs() == []
    assert main.main(["runs"]) == 0
    assert f"{run.name}/plan.json: missing" in capsys.readouterr().out
    with pytest.raises(launcher.UserError, match="no such run"):
        launcher.attach("young")


@pytest.mark.parametrize("file, size", [("plan.json", 65 * 2**20), ("outcome.json", 65 * 2**20)])
def test_a_record_beyond_the_limit_is_damaged(file, size, capsys):
    run = recorded("job-20261122-100000-aaaa")
    os.truncate(run.path / file, size)
    assert main.main(["show", run.name]) == 2
    assert f"{file}: over 64 MiB" in capsys.readouterr().err


NOBODY = 65534
"""Another user's number."""


@pytest.mark.parametrize("place", ["store", STARTING, "run", "code"])
@pytest.mark.parametrize("mode, owner", [(0o757, None), (0o755, NOBODY), (0o1777, NOBODY)])
def test_no_code_runs_from_a_store_that_other_users_can_change(script_job, capsys, mode, owner, place):
    planned = launcher.plan(script_job("print('ran')"))
    run = recorded("job-20261122-100000-aaaa", state="Stopped")
    run.job.write_text(yaml.safe_dump(planned.kept_job()))
    shutil.copytree(planned.job.source, run.code)
    (records.store() / STARTING).mkdir()
    bad = {"store": records.store(), STARTING: records.store() / STARTING, "run": run.path, "code": run.code}[place]
    bad.chmod(mode)
    if owner is not None:
        if os.getuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(bad, owner, owner)
    for start in (
        lambda: launcher.replay(run.name),
        lambda: launcher.resume(run.name),
        lambda: launcher.run(replace(planned, resumes=run.name)),
        *([lambda: launcher.run(planned)] if place in ("store", STARTING) else []),
    ):
        with pytest.raises(launcher.UserError, match=f"{bad} .*other users can change the code in it"):
            start()
    assert [one.name for one in launcher.runs()] == [run.name], "nothing has started"


@pytest.mark.parametrize("mode", [0o775, 0o1777])
def test_a_store_that_a_team_shares_is_used(script_job, mode):
    records.store().mkdir()
    records.store().chmod(mode)
    run = launcher.run(launcher.plan(script_job("print('ran')")))
    assert run.wait(60) == "Completed"
    assert launcher.replay(run.name).replay_of == run.name


def test_a_store_made_without_a_umask_is_closed_to_other_users_and_used(script_job):
    before = os.umask(0)
    try:
        run = launcher.run(launcher.plan(script_job("print('ran')")))
    finally:
        os.umask(before)
    assert run.wait(60) == "Completed"
    made = [records.store(), *records.store().rglob("*")]
    assert run.folder.code in made and run.folder.host("algo-1") / "model" in made
    assert [path for path in made if path.lstat().st_mode & 0o002 and not path.is_symlink()] == []
    assert launcher.replay(run.name).replay_of == run.name


@pytest.mark.parametrize("kind", ["a file", "a file above", "a broken link"])
def test_a_file_in_the_place_of_the_store_is_named(script_job, store, monkeypatch, capsys, kind):
    """Neither a run that has started already nor an empty store."""
    planned = launcher.plan(script_job("print('ran')"))
    if kind == "a broken link":
        store.symlink_to(store.with_name("gone"))
    else:
        store.write_text("runs of mine\n")
    if kind == "a file above":
        monkeypatch.setenv("LAUNCHER_RUNS", str(store / "runs"))
    named = f"LAUNCHER_RUNS: {store} is {kind.removesuffix(' above')}, and no folder for runs"
    with pytest.raises(launcher.UserError, match=re.escape(named)) as refused:
        launcher.run(planned)
    assert refused.value.issues[0].fix.startswith("set LAUNCHER_RUNS to a folder")
    for words in (
        ["runs"],
        ["runs", "--json"],
        ["show", "job"],
        ["rm", "job", "--yes"],
        ["prune", "--older-than", "1d"],
    ):
        assert main.main(words) == 2, words
        out, err = capsys.readouterr()
        assert named in err and "no runs" not in out
    assert not store.is_dir()


def test_a_file_in_the_place_where_runs_are_made_is_no_run_that_has_started(script_job):
    records.store().mkdir()
    (records.store() / STARTING).touch()
    with pytest.raises(FileExistsError):
        launcher.run(launcher.plan(script_job("print('ran')")))


def test_a_link_in_the_place_where_runs_are_made_is_not_followed(script_job, tmp_path):
    old = tmp_path / "mine/old"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    records.store().mkdir()
    (records.store() / STARTING).symlink_to(old.parent)
    with pytest.raises(launcher.UserError, match="is a link"):
        launcher.run(launcher.plan(script_job("print('ran')")))
    assert old.is_dir()


def test_a_damaged_run_is_named_with_its_file_and_the_others_are_listed(capsys):
    good, bad = recorded("good-20261122-100000-aaaa"), recorded("bad-20261122-100001-aaaa")
    bad.outcome.write_text("")
    assert main.main(["runs"]) == 0
    out = capsys.readouterr().out
    assert f"{good.name}  Completed" in out and f"{bad.name}   damaged" in out
    assert f"{bad.name}/outcome.json: the file is empty" in out and f"launcher rm {bad.name}" in out
    assert main.main(["runs", "--json"]) == 0
    described = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert described[good.name]["state"] == "Completed" and "outcome.json" in described[bad.name]["damaged"][0]["key"]
    bad.outcome.write_text('{"state": "Completed", "seconds": "soon"}')
    for command in ("show", "logs", "stop", "attach", "replay", "diagnose"):
        assert main.main([command, bad.name]) == 2
    reported = capsys.readouterr().err
    assert reported.count("outcome.json: seconds: input should be a valid number, not 'soon'") >= 4, reported


def test_the_latest_runs_are_listed_unless_more_are_asked_for(capsys):
    names = [recorded(f"job-20261122-1000{second:02}-aaaa").name for second in range(60)]

    def listed(*options: str) -> list[str]:
        assert main.main(["runs", *options]) == 0
        out = capsys.readouterr().out
        assert ("of 60 runs; --last N or --all lists more" in out) == (options != ("--all",))
        return [line.split()[0] for line in out.splitlines() if line.startswith("job-")]

    assert listed() == names[-50:] and listed("--last", "3") == names[-3:] and listed("--all") == names
    assert main.main(["runs", "--last", "0"]) == 2


def test_a_job_is_found_among_its_own_runs_and_a_listing_reads_each_file_once(capsys, monkeypatch):
    runs = [recorded(f"job-{number}-20261122-10000{number % 10}-aaaa") for number in (10, 1, 2)]
    looked_at: list[str] = []
    read: list[str] = []

    def noting(module, name, places):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda place: places.append(str(place)) or real(place))

    noting(os.path, "lexists", looked_at)
    noting(records.trust, "content", read)
    assert records.find("job-1") == runs[1] and looked_at == [str(runs[1].plan)]
    assert main.main(["runs", "--all"]) == 0 and capsys.readouterr().out.count("Completed") == 3
    assert read == [str(file) for run in runs for file in (run.plan, run.outcome)]


def test_a_run_that_ends_while_it_is_looked_at_has_its_own_outcome(monkeypatch):
    run = recorded("job-20261122-100000-aaaa", state="")

    def ends(folder: RunFolder) -> bool:
        folder.outcome.write_text('{"state": "Completed"}')
        return False

    monkeypatch.setattr(RunFolder, "supervisor_lives", ends)
    assert launcher.attach(run.name).outcome() == {"state": "Completed"}


def test_metrics_end_before_a_line_that_was_cut():
    run = recorded("job-20261122-100000-aaaa")
    run.metrics.write_bytes(b'{"step": 1, "loss": NaN}\n[]\n\xff\n{"step": 2}\n{"step": ')
    assert [metric["step"] for metric in launcher.attach("job").metrics()] == [1, 2]


def test_a_record_is_on_the_disk_before_it_has_its_name_and_a_busy_file_need_not_be(tmp_path, monkeypatch):
    done: list[str] = []

    def noted(name, function):
        def call(*arguments):
            at = arguments[0]
            done.append(f"{name} {'folder' if name == 'fsync' and os.path.isdir(f'/proc/self/fd/{at}') else 'file'}")
            return function(*arguments)

        monkeypatch.setattr(os, name, call)

    noted("fsync", os.fsync)
    noted("replace", os.replace)
    records.write_json(tmp_path / "outcome.json", {})
    assert done == ["fsync file", "replace file", "fsync folder"]
    done.clear()
    records.write_json(tmp_path / "streams.json", {}, durable=False)
    assert done == ["replace file"]


def test_a_link_planted_where_a_record_is_first_written_is_not_followed(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    monkeypatch.setattr(os, "urandom", bytes)  # even of a name that could be guessed
    names: list[str] = []
    monkeypatch.setattr(os, "replace", lambda temporary, _: names.append(temporary.name))
    records.write_json(tmp_path / "outcome.json", {})
    (tmp_path / names[0]).unlink()
    (tmp_path / names[0]).symlink_to(mine)
    with pytest.raises(FileExistsError):
        records.write_json(tmp_path / "outcome.json", {})
    assert mine.read_text() == "mine"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    file = tmp_path / "outcome.json"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        records.write_atomically(file, "\udc80")
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


def test_of_a_package_that_is_installed_twice_the_imported_version_is_recorded(tmp_path, monkeypatch):
    for place in ("1.0", "2.0"):
        (tmp_path / place / f"twice-{place}.dist-info").mkdir(parents=True)
        (tmp_path / place / f"twice-{place}.dist-info/METADATA").write_text(f"Name: twice\nVersion: {place}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "1.0"), *sys.path, str(tmp_path / "2.0")])
    found = installed_versions()
    assert found["twice"] == "1.0" and {"python", "system", "torch"} <= {*found}


def test_a_terminal_gets_colours_and_no_other_control_sequence():
    assert neutralised(COLOURED) == COLOURED
    assert neutralised("a\r\x1b[Kb\tc\n") == "a\r\x1b[Kb\tc\n"
    seen = neutralised(ESCAPES)
    assert seen == r"\x1b]0;title\x07\x1b[2J\x1b[1A\x9b5n\x1bP1$r\x1b" + "\\" + r"\x08\x7f"
    assert neutralised("a\u202eb\u2066c\u2069\u200d") == r"a\u202eb\u2066c\u2069" + "\u200d"
    assert neutralised("\x1b") + neutralised("[2J") == r"\x1b[2J", "a sequence in two parts is none either"


def in_a_terminal(*words: str) -> bytes:
    """What a command writes to a terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *words], stdin=child, stdout=child, stderr=child, cwd=ROOT
    )
    os.close(child)
    written = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        written += part
    os.close(parent)
    assert process.wait() in (0, 1, 2)
    return written


def test_what_a_script_wrote_commands_no_terminal_and_passes_a_pipe_unchanged(store):
    run = recorded("job-20261122-100000-aaaa", state="")
    raw = f"{COLOURED}\n{ESCAPES}\r\n".encode() + b"\xff\xfe no UTF-8\nnot ended"
    run.log("algo-1").write_bytes(raw)
    run.outcome.write_text(json.dumps({"state": "Failed", "failure": f"died {ESCAPES}", "failed_host": "algo-1"}))
    for words in (("logs", "job"), ("show", "job"), ("attach", "job", "--logs"), ("attach", "job")):
        shown = in_a_terminal(*words)
        assert rb"\x1b]0;title\x07\x1b[2J\x1b[1A\x9b5n" in shown, words
        assert b"\x1b]" not in shown and b"\x1b[2J" not in shown and b"\x9b5n" not in shown and b"\x07" not in shown, (
            words
        )
    piped = subprocess.run([sys.executable, "-m", "launcher", "logs", "job"], capture_output=True, cwd=ROOT, check=True)
    assert piped.stdout == raw and piped.stderr == b""
    assert (
        in_a_terminal("logs", "job")
        .strip()
        .endswith(b"job-20261122-100000-aaaa: Failed; next: launcher show job-20261122-100000-aaaa")
    )
    run.log("algo-1").unlink()
    nothing = subprocess.run(
        [sys.executable, "-m", "launcher", "logs", "job"], capture_output=True, cwd=ROOT, text=True, check=True
    )
    assert nothing.stderr.startswith("no lines; job-20261122-100000-aaaa: Failed; next: ") and nothing.stdout == ""

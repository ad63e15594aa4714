"""What a stranger's broken script leaves: the words that say what to do, and a log without the toolkit's own lines."""

from __future__ import annotations

import sys
import tracemalloc

import pytest

import launcher
from launcher.commands import foreground
from launcher.record import failures
from launcher.record.records import RunFolder
from launcher.record.toolkit_lines import ToolkitLines
from tests.launcher.real_logs import BENIGN, CHILD_FAILED, OUT_OF_MEMORY, lines
from tests.launcher.test_commands import typed


def ended(script_job, text: str, **values) -> dict:
    """The outcome of a script that fails."""
    run = launcher.run(launcher.plan(script_job(text, **values)))
    assert run.wait(120) == "Failed"
    return run.outcome()


RANKS = {"distribution": "torchrun", "compute": {"processes_per_host": 2}}
PARSES = """
    import sys, runpy
    sys.argv[1:] = {arguments}
    import argparse
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--" + "rate", type=float)
    print("starts", flush=True)
    parser.parse_args()
"""


@pytest.mark.parametrize("values", [{}, RANKS], ids=["one process", "torchrun"])
def test_wrong_arguments_show_the_parsers_words(script_job, values):
    outcome = ended(script_job, PARSES.format(arguments=["--rate", "x"]), **values)
    refused = "train.py: error: argument --rate: invalid float value: 'x'"
    first, *reported = outcome["failure"].splitlines()
    assert first == "the last lines of its output:" and refused in reported
    assert reported[-1] == refused or "distribution" in values  # where another rank may have printed after it
    assert "usage: train.py [-h] [--rate RATE]" in reported and outcome["exit_code"] == 2
    assert "parser refuses" in outcome["cause"] and "hyperparameters" in outcome["fix"]


def test_the_traceback_of_one_rank_is_whole_and_torchruns_own_is_left_out(script_job):
    text = """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("bad shard")
        time.sleep(100)
    """
    outcome = ended(script_job, text, **RANKS)
    assert outcome["failure"] == "ValueError: bad shard" and outcome["exit_code"] == 1
    first, place, line, *_, last = outcome["traceback"].splitlines()
    assert first == "Traceback (most recent call last):" and last == outcome["failure"]
    assert place.startswith('  File "/') and place.endswith('code/script.py", line 4, in <module>')
    assert line == '    raise ValueError("bad shard")' and "ChildFailedError" not in outcome["traceback"]


def test_a_module_that_is_missing_is_named_with_the_environment_that_lacks_it(script_job):
    outcome = ended(script_job, "import a_module_that_is_not_there.below")
    assert outcome["failure"] == "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    assert outcome["cause"].endswith("has no module a_module_that_is_not_there")
    assert f"{sys.executable} -m pip install" in outcome["fix"] and "installs no requirements.txt" in outcome["fix"]


def test_a_misspelt_module_of_the_users_own_package_is_no_missing_package(script_job, tmp_path):
    package = tmp_path / "source/mypackage"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "training_loop.py").touch()
    outcome = ended(script_job, "import mypackage.trainin_loop")
    assert outcome["cause"] == "the source folder has mypackage, but no module mypackage.trainin_loop"
    assert "import" in outcome["fix"] and "pip" not in outcome["fix"]


ENDS = {
    "silent": ("raise SystemExit(3)", "the script printed nothing (exit code 3)", 3, None),
    "without a word": ("print('epoch', 1, 'done')\nraise SystemExit(3)", "the last lines of its output:\nepoch 1 done", 3, None),
    "text": ("import sys; sys.exit('no images below data')", "the last lines of its output:\nno images below data", 1, None),
    "crash": ("import ctypes\nprint('starts', flush=True)\nctypes.string_at(0)", "the last lines of its output:\nstarts", -11, "native code"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "the script printed nothing (killed by SIGKILL)", -9, "memory"),
    "file": ("open('/data/none.csv')", "FileNotFoundError: [Errno 2] No such file or directory: '/data/none.csv'", 1, "/data/none.csv does not exist"),
    "channel": ("import os; os.environ['SM_CHANNEL_TRAINING']", "KeyError: 'SM_CHANNEL_TRAINING'", 1, "channel"),
    "long": ("for i in range(30_000): print('line', i)\n1 / 0", "ZeroDivisionError: division by zero", 1, None),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_however_a_script_ends_its_record_says_what_is_known(script_job, end):
    text, failure, code, cause = ENDS[end]
    outcome = ended(script_job, text)
    assert (outcome["failure"], outcome["exit_code"]) == (failure, code)
    assert (cause in outcome["cause"] and outcome["fix"]) if cause else "cause" not in outcome


def test_a_log_without_an_end_of_line_is_read_in_part(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log("algo-1").parent.mkdir()
    with open(folder.log("algo-1"), "wb") as log:
        log.write(b"starts\n")
        log.truncate(2**28)
        log.seek(0, 2)
        log.write(b'\rTraceback (most recent call last):\n  File "a.py", line 1\nValueError: odd\n')
    tracemalloc.start()
    outcome = failures.describe(folder, ["algo-1"], "")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcome["failure"] == "ValueError: odd" and most < 2**25


def test_the_end_of_a_run_prints_it(script_job, capsys):
    outcome = ended(script_job, "print('starts', flush=True)\nimport ctypes; ctypes.string_at(0)")
    foreground.print_failure(outcome)
    assert capsys.readouterr().out.startswith(
        "  failed on algo-1, killed by SIGSEGV:\n    the last lines of its output:\n    starts\n  cause: "
    )
    foreground.print_failure(
        {"failure": "ValueError: odd", "traceback": "Traceback …\nValueError: odd", "exit_code": 1}
    )
    assert capsys.readouterr().out == "  failed, exit code 1:\n    Traceback …\n    ValueError: odd\n"
    foreground.print_failure(
        {"failure": "rank 0: ValueError: odd\nat step 3", "traceback": "Traceback …\nValueError: odd"}
    )
    assert capsys.readouterr().out == "  failed:\n    rank 0: ValueError: odd\n    at step 3\n"


# --- a job on SageMaker, from its reason and its log

SHORT = 'AlgorithmError: ExecuteUserScriptError:\nExitCode 1\nErrorMessage ""\nCommand "/opt/conda/bin/python3.10 train.py", exit code: 1'
CUT_TRACEBACK = lines("""
    Traceback (most recent call last):
    File "/opt/ml/code/train.py", line 2, in <module>
    import timm
    ModuleNotFoundError
    : No module named 'timm'
""")
"""As the toolkit's reader leaves one in AWS's images."""


@pytest.fixture
def described(tmp_path):
    """Describes a failure of `algo-1`, `algo-2` … from a reason and their logs."""

    def make(reason: str, *logs: list[str]) -> dict:
        folder = RunFolder(tmp_path)
        (tmp_path / "logs").mkdir(exist_ok=True)
        for number, log in enumerate(logs, 1):
            folder.log(f"algo-{number}").write_text("\n".join(log))
        return failures.describe(folder, [f"algo-{number}" for number, _ in enumerate(logs, 1)], reason)

    return make


def test_a_reason_of_the_toolkit_gives_way_to_the_log(described):
    found = described(SHORT, [*BENIGN, *CUT_TRACEBACK])
    assert found["failure"] == "ModuleNotFoundError: No module named 'timm'" and found["exit_code"] == 1
    assert found["traceback"].splitlines()[1:3] == [
        '  File "/opt/ml/code/train.py", line 2, in <module>',
        "    import timm",
    ]
    assert "requirements.txt in the source folder" in found["fix"]


def test_the_host_with_the_traceback_is_the_one_that_failed(described):
    found = described(SHORT, BENIGN, [*OUT_OF_MEMORY, *CHILD_FAILED])
    assert found["failed_host"] == "algo-2" and found["failure"] == OUT_OF_MEMORY[-1]


def test_a_reason_without_a_log_stays(described):
    assert described(SHORT)["failure"] == SHORT
    assert described(SHORT, [])["failure"] == SHORT


def test_a_reason_of_the_scripts_own_stays(described):
    own = "AlgorithmError: rank 3: ValueError: the batch is odd, exit code: 1"
    assert described(own, [*BENIGN, *CUT_TRACEBACK])["failure"] == own


def test_what_the_engine_says_besides_is_kept(described):
    reason = (
        SHORT.partition(", exit")[0]
        + "\na process was killed: the host reached its limit of memory; raise compute.memory_gb"
    )
    assert (
        described(reason, ["loading", *CHILD_FAILED])["failure"]
        .splitlines()[-1]
        .startswith("a process was killed: the host")
    )


def test_of_mpiruns_log_only_what_the_ranks_printed_counts(described):
    log = lines("""
        [1,mpirank:0,algo-1]<stderr>:usage: train.py [-h]
        [1,mpirank:1,algo-1]<stderr>:usage: train.py [-h]
        [1,mpirank:0,algo-1]<stderr>:train.py: error: unrecognized arguments: --x
        --------------------------------------------------------------------------
        Primary job  terminated normally, but 1 process returned
        a non-zero exit code. Per user-direction, the job has been aborted.
    """)
    found = described(SHORT, log)
    assert found["failure"].splitlines()[1:] == ["usage: train.py [-h]", "train.py: error: unrecognized arguments: --x"]


# --- the toolkit's lines


def test_the_toolkits_lines_of_a_real_run_are_hidden_and_the_scripts_are_whole(script_job):
    text = """
        import logging, sys
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stdout)
        logging.getLogger("mine").info("2 images")
        print("loss", 0.5, "rate", 1)
        print("  indented")
        sys.exit("the end")
    """
    run = launcher.run(launcher.plan(script_job(text)))
    assert run.wait(60) == "Failed"
    shown = typed("logs", run.name).stdout.splitlines()
    assert shown[0].endswith(" mine INFO 2 images") and shown[1].strip() == "loss 0.5 rate 1"
    assert [line.strip() for line in shown[2:]] in (["indented", "the end"], ["the end", "indented"])  # two pipes
    everything = typed("logs", run.name, "--all").stdout
    assert everything.encode() == run.folder.log("algo-1").read_bytes()
    assert "Invoking user script" in everything and "SM_HPS" in everything and "ExitCode 1" in everything


def test_a_script_that_prints_nothing_leaves_the_toolkits_lines_and_logs_says_so(script_job):
    run = launcher.run(launcher.plan(script_job("pass")))
    assert run.wait(60) == "Completed"
    said, everything = typed("logs", run.name), typed("logs", run.name, "--all")
    lines = len(everything.stdout.splitlines())
    assert said.stdout == "" and lines > 10 and everything.stderr == ""
    assert said.stderr.startswith(
        f"no lines of the script, {lines} of the container toolkit (--all); {run.name}: Completed after "
    )
    assert said.stderr.endswith(f"next: launcher diagnose {run.name}\n")


def test_the_toolkits_errors_about_itself_are_shown():
    toolkit, at = ToolkitLines(), "2026-11-21 07:03:16,220 sagemaker-training-toolkit"
    log = [
        f"{at} ERROR    Reporting training FAILURE",
        f"{at} ERROR    The training entry point 'a b.py' cannot be used",
        f"{at} ERROR    InstallRequirementsError:",
        "ExitCode 1",
        f"{at} ERROR    Encountered exit_code 1",
        "bash: no job control in this shell",
        "2026-11-21 07:03:16,220 mine INFO     2 images",
    ]
    assert [line for line in log if not toolkit.has(line)] == [log[1], log[-1]]


def test_only_the_toolkits_lines_of_a_log_are_its_own():
    toolkit = ToolkitLines()
    assert [line for line in BENIGN if toolkit.has(line)] == BENIGN[:1]

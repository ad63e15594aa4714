"""The first traceback in a log, whoever else writes there."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.record.failure_causes import first_traceback
from tests.launcher.real_logs import BENIGN, CHAINED, CHILD_FAILED, OUT_OF_MEMORY, TEXTS, lines


def test_the_first_traceback_comes_whole_and_launchers_reports_are_skipped():
    log = BENIGN + OUT_OF_MEMORY + CHILD_FAILED
    assert first_traceback(log) == "\n".join(OUT_OF_MEMORY)


def test_a_launchers_report_alone_is_no_traceback():
    assert first_traceback(CHILD_FAILED) == ""
    assert first_traceback(lines("""
        Traceback (most recent call last):
          File "/opt/conda/lib/python3.10/site-packages/sagemaker_training/trainer.py", line 80, in train
            entrypoint()
        sagemaker_training.errors.ExecuteUserScriptError: ExecuteUserScriptError:
        ExitCode 1
    """)) == ""  # fmt: skip
    assert first_traceback(lines("""
        Traceback (most recent call last):
          File "/opt/conda/bin/torchrun", line 8, in <module>
            sys.exit(main())
        torch.distributed.elastic.multiprocessing.api.SignalException: Process 61 got signal: 15
    """)) == ""  # fmt: skip


def test_no_traceback_is_the_empty_text():
    assert first_traceback([]) == ""
    assert first_traceback(BENIGN) == ""
    assert first_traceback(["Traceback (most recent call last):"]) == ""


def test_chained_exceptions_stay_together():
    assert first_traceback(CHAINED.splitlines() + ["", "epoch 1/3 step 1/3 loss 1.0"]) == CHAINED


def test_a_second_traceback_of_the_same_process_is_left_out():
    other = CHAINED.split("\n\n")[0]
    assert first_traceback(other.splitlines() + ["", "trying again"] + OUT_OF_MEMORY) == other
    assert first_traceback(other.splitlines() + OUT_OF_MEMORY) == other


@pytest.mark.parametrize(
    "prefix",
    ["[rank3]: ", "[1,mpirank:3,algo-2]<stderr>:", "[1,3]<stderr>:", "[default3]:", "algo-1-x7k2p  | ", "\x1b[36malgo-2-x7k2p |\x1b[0m "],
)  # fmt: skip
def test_prefixes_are_removed_and_ranks_are_not_mixed(prefix):
    mine = [prefix.replace("3", "1").replace("algo-2", "algo-1") + line for line in CHAINED.splitlines()]
    other = [prefix.replace("3", "5").replace("algo-1", "algo-3") + line for line in OUT_OF_MEMORY]
    mixed = []
    for number in range(max(len(mine), len(other))):
        mixed += other[number : number + 1] + mine[number : number + 1]
    assert first_traceback(mixed) == "\n".join(OUT_OF_MEMORY)
    assert first_traceback(mixed[1:2] + mixed[:1] + mixed[2:]) == CHAINED


def test_the_toolkits_reader_may_take_the_blanks_and_other_processes_may_write_between():
    log = lines("""
        Traceback (most recent call last):
        File "train_kd.py", line 98, in <module>
        main(read_settings(DistillationSettings))
        epoch 1/3 step 20/400 loss 2.1113
        File "/opt/ml/code/training/engine/loop.py", line 120, in train
        losses["loss"].backward()
        ^^^^^^^^^^^^^^^^^^^^^^^^^
        RuntimeError: Error(s) in loading state_dict for VisionTransformer:
        size mismatch for head.weight: copying a param with shape torch.Size([1000, 384]) from checkpoint, the shape in current model is torch.Size([10, 384]).
        epoch 1/3 step 30/400 loss 2.1113
    """)
    blanks = ["", "  ", "    ", "  ", "    ", "    ", "", ""]  # they are put back, and none before the exception
    written = [line for line in log if not line.startswith("epoch")]
    assert first_traceback(log).splitlines() == [before + line for before, line in zip(blanks, written, strict=True)]


def test_an_exception_that_the_reader_cut_behind_its_name_is_whole():
    log = lines("""
        Traceback (most recent call last):
        File "train.py", line 2, in <module>
        import timm
        ModuleNotFoundError
        : No module named 'timm'
        2026-11-21 07:03:16,220 sagemaker-training-toolkit ERROR    Reporting training FAILURE
    """)
    assert first_traceback(log).splitlines()[-1] == "ModuleNotFoundError: No module named 'timm'"


def test_a_data_workers_own_traceback_is_part_of_the_message():
    text = "\n".join(lines("""
        Traceback (most recent call last):
          File "train.py", line 5, in <module>
            for batch in loader:
        RuntimeError: Caught RuntimeError in DataLoader worker process 0.
        Original Traceback (most recent call last):
          File "worker.py", line 302, in _worker_loop
            data = fetcher.fetch(index)
        PIL.UnidentifiedImageError: cannot identify image file 'a.jpg'
    """))  # fmt: skip
    assert first_traceback(text.splitlines()) == text


def test_the_process_that_spawn_started_is_heard_instead_of_spawn():
    inner = [
        "Traceback (most recent call last):",
        '  File "wrap.py", line 69, in _wrap',
        "    fn(i, *args)",
        "ValueError: wrong",
    ]
    log = lines("""
        Traceback (most recent call last):
          File "spawn.py", line 160, in join
            raise ProcessRaisedException(msg, error_index, failed_process.pid)
        torch.multiprocessing.spawn.ProcessRaisedException:

        -- Process 0 terminated with the following error:
    """)
    assert first_traceback(log + inner) == "\n".join(inner)


def test_a_traceback_may_begin_behind_a_progress_bar():
    first, *rest = OUT_OF_MEMORY
    assert first_traceback(["\r 10%|#   | 1/10 [00:01<00:09]" + first, *rest]) == "\n".join(OUT_OF_MEMORY)


def test_torchs_own_prefix_keeps_messages_of_several_lines():
    log = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "a.py", line 1, in <module>',
        "[rank0]:     x.item()",
        "[rank0]: torch.AcceleratorError: CUDA error: device-side assert triggered",
        "[rank0]: Search for `cudaErrorAssert' in https://docs.nvidia.com for more information.",
        "[rank0]: CUDA kernel errors might be asynchronously reported at some other API call.",
        "[rank0]:",
        "[rank0]:[W1121 07:03:15.866 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called",
    ]
    assert first_traceback(log).splitlines()[-1].startswith("CUDA kernel errors")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(st.lists(TEXTS, max_size=30))
def test_a_found_traceback_has_a_beginning_and_an_exception(log):
    text = first_traceback(log)
    if text:
        assert text.split("\n")[0].endswith("Traceback (most recent call last):")
        assert len(text.split("\n")) >= 2

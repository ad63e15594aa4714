"""Logs in the shape of real ones, and the known causes that explain them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from training.settings import distillation, scripts, segmentation

from launcher.config import sections
from launcher.config.job import Job
from launcher.record.failure_causes import LAST_LINES, Explanation, explain, first_traceback
from tests.launcher.real_logs import BENIGN, CHILD_FAILED, OUT_OF_MEMORY, TEXTS, WATCHDOG, lines

ROOT = Path(__file__).parents[2]

# --- explain: (words of the cause, words of the fix, the line that shows it)

FROM_THE_LOG = [
    ("a GPU ran out of memory", "global_batch_size", OUT_OF_MEMORY[-1]),
    ("a GPU ran out of memory", "global_batch_size", "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 2 has a total capacity of 79.11 GiB"),
    ("a GPU ran out of memory", "global_batch_size", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("the host ran out of memory", "num_workers", "RuntimeError: DataLoader worker (pid 19597) is killed by signal: Killed. "),
    ("the host ran out of memory", "num_workers", "RuntimeError: [enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 154140672 bytes. Error code 12 (Cannot allocate memory)"),
    ("the host ran out of memory", "num_workers", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array with shape (1, 2)"),
    ("the host ran out of memory", "num_workers", "MemoryError"),
    ("killed", "num_workers", 'ExtraInfo "OutOfMemory: Process killed by SIGKILL (signal 9)"'),
    ("killed", "num_workers", "E1121 07:03:15.898000 32360 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 17) of binary: /opt/conda/bin/python3.10"),
    ("killed", "num_workers", "mpirun noticed that process rank 3 with PID 0 on node algo-1 exited on signal 9 (Killed)."),
    ("killed", "num_workers", "algo-1-x7k2p exited with code 137"),
    ("shared memory", "compute.shm_gb", "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."),
    ("shared memory", "num_workers", "RuntimeError: DataLoader worker (pid 2190) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."),
    ("shared memory", "num_workers", "algo-1:94:200 [0] misc/shmutils.cc:72 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-XjZ3qJ (size 5767520), error: No space left on device (28)"),
    ("disk is full", "compute.volume_gb", "OSError: [Errno 28] No space left on device: '/opt/ml/checkpoints/last.pt'"),
    ("no module timm", "requirements.txt", "ModuleNotFoundError: No module named 'timm'"),
    ("no module timm", "requirements.txt", ": No module named 'timm'"),
    ("no module torch.distributed.fsdp2", "requirements.txt", "ModuleNotFoundError: No module named 'torch.distributed.fsdp2'"),
    ("libGL.so.1", "opencv-python-headless", "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"),
    ("timed out waiting for a rank", "read its log", WATCHDOG[0]),
    ("cannot reach each other", "network.security_groups", "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5"),
    ("cannot reach each other", "network.security_groups", "tj1-asr-13:941227:943077 [0] include/socket.h:390 NCCL WARN Connect to 10.38.10.112<21724> failed : Connection refused"),
    ("cannot reach each other", "network.security_groups", "[E socket.cpp:922] [c10d] The client socket has timed out after 900s while trying to connect to (algo-1, 7777)."),
    ("cannot reach each other", "network.security_groups", "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.1.7]:61250"),
    ("network interface", "NCCL_SOCKET_IFNAME", "ip-10-0-225-125:17:52 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 169.254.255.18<42219> failed : Software caused connection abort"),
    ("s3:PutObject on arn:aws:s3:::bucket/key", "s3:PutObject on arn:aws:s3:::bucket/key", 'botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the PutObject operation: User: arn:aws:sts::123456789012:assumed-role/SM/SageMaker is not authorized to perform: s3:PutObject on resource: "arn:aws:s3:::bucket/key" because no identity-based policy allows the s3:PutObject action'),
    ("HeadObject", "permission for HeadObject", "botocore.exceptions.ClientError: An error occurred (403) when calling the HeadObject operation: Forbidden"),
    ("kms:Decrypt is not allowed", "kms:Decrypt", "ClientError: User is not permitted to perform kms:Decrypt for operation GetEnvironment"),
    ("KMS key", "output_key", "An error occurred (AccessDenied) when calling the GetObject operation: The ciphertext refers to a customer master key that does not exist, does not exist in this region, or you are not allowed to access."),
    ("data parallel library", "distribution to torchrun", "ModuleNotFoundError: No module named 'smdistributed'"),
    ("data parallel library", "distribution to torchrun", "AssertionError: Unknown backend type smddp"),
    ("data parallel library", "distribution to torchrun", "ImportError: libsmddpcpp.so: cannot open shared object file: No such file or directory"),
    ("does not support ReduceOp", "distribution to torchrun", "RuntimeError: SMDDP does not support: ReduceOp"),
    ("no sshd", "openssh-server", "SSH daemon not found, please install SSH to allow MPI to communicate different nodes in cluster."),
    ("pip cannot reach a package index", "NAT gateway", "WARNING: Retrying (Retry(total=4, connect=None, read=None, redirect=None, status=None)) after connection broken by 'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: [Errno 110] Connection timed out')': /simple/timm/"),
    ("pip cannot find timm==9.9", "requirements.txt", "ERROR: Could not find a version that satisfies the requirement timm==9.9 (from versions: 1.0.30, 1.0.31)"),
    ("requirements.txt could not be installed", "pip's lines", "2019-12-03 09:59:11,038 sagemaker-training-toolkit ERROR    InstallRequirementsError:"),
    ("Hugging Face Hub", "hyperparameters.pretrained", "requests.exceptions.ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /timm/vit\"))"),
    ("label is outside", "number of classes", "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [4,0,0] Assertion `t >= 0 && t < n_classes` failed."),
    ("label is outside", "number of classes", "IndexError: Target 12 is out of bounds."),
    ("memory outside its bounds", "CUDA_LAUNCH_BLOCKING", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("another model than this VisionTransformer", "hyperparameters.student", "RuntimeError: Error(s) in loading state_dict for VisionTransformer:"),
    ("NaN or infinite", "learning_rate", "Loss is nan, stopping training"),
    ("NaN or infinite", "learning_rate", "FloatingPointError: the loss is not finite at step 12"),
    ("NaN or infinite", "learning_rate", "epoch 2/3 step 40/400 loss nan learning_rate 0.0010 images/s 812.4"),
    ("crashed in native code", "PYTHONFAULTHANDLER", "ExitCode -11"),
    ("crashed in native code", "PYTHONFAULTHANDLER", "E1121 07:03:15.898000 32360 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -6) local_rank: 0 (pid: 17) of binary: /opt/conda/bin/python3.10"),
    ("killed", "num_workers", "ExitCode -9"),
    ("parser refuses", "hyperparameters", "train.py: error: unrecognized arguments: --momentum 0.9"),
    ("parser refuses", "hyperparameters", "train.py: error: the following arguments are required: --data-dir"),
    ("parser refuses", "hyperparameters", "train.py: error: argument --lr: invalid float value: 'x'"),
    ("parser refuses", "hyperparameters", "Error: No such option: --momentum"),
    ("parser refuses", "hyperparameters", "FATAL Flags parsing error: Unknown command line flag 'momentum'"),
    ("parser refuses", "hyperparameters", "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--momentum', '0.9']"),
    ("an input channel that the job does not have", "inputs", "FileNotFoundError: [Errno 2] No such file or directory: '/opt/ml/input/data/training/labels.csv'"),
    ("an input channel that the job does not have", "SM_CHANNEL_<NAME>", "KeyError: 'SM_CHANNEL_TRAINING'"),
    ("/opt/ml/model/last.pt does not exist", "--on docker", "FileNotFoundError: [Errno 2] No such file or directory: '/opt/ml/model/last.pt'"),
    ("/data/imagenet does not exist", "inputs.<channel>", "FileNotFoundError: [Errno 2] No such file or directory: '/data/imagenet'"),
    ("may not write (or read) /results", "SM_MODEL_DIR", "PermissionError: [Errno 13] Permission denied: '/results'"),
    ("may not write (or read) /opt/ml/input/data/train/cache", "SM_MODEL_DIR", "OSError: [Errno 30] Read-only file system: '/opt/ml/input/data/train/cache'"),
    ("storage did not give algo-3 /opt/ml/input/data/train/a b/1.jpg for 48 s: Input/output error (EIO)", "launcher resume", "training.data.storage.StorageError: storage fails on algo-3: /opt/ml/input/data/train/a b/1.jpg: Input/output error (EIO), in 8 tries over 48 s. No image is counted as broken."),
    ("storage did not give /opt/ml/input/data/train/1.npy: Stale file handle", "inputs.<channel>.mode", "OSError: [Errno 116] Stale file handle: '/opt/ml/input/data/train/1.npy'"),
    ("asks for a GPU", "compute.instance_type", "AssertionError: Torch not compiled with CUDA enabled"),
    ("asks for a GPU", "compute.instance_type", "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
    ("asks for a GPU", "map_location", "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False."),
    ("no program ffmpeg", "image.uri", "prepare.sh: line 3: ffmpeg: command not found"),
    ("no program ffmpeg", "image.uri", "sh: 1: ffmpeg: not found"),
    ("uses the port", "wait for that run", "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 7777, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
]  # fmt: skip

FROM_SAGEMAKER = [
    ("no free hosts", "compute.instance_type", "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."),
    ("no free hosts", "compute.instance_type", "Unable to provision requested ML compute capacity due to InsufficientInstanceCapacity error."),
    ("'ml.p4d.24xlarge for training job usage' is 0 Instances", "Service Quotas", "An error occurred (ResourceLimitExceeded) when calling the CreateTrainingJob operation: The account-level service limit 'ml.p4d.24xlarge for training job usage' is 0 Instances, with current utilization of 0 Instances and a request delta of 2 Instances. Please use AWS Service Quotas to request an increase for this quota."),
    ("a quota", "Service Quotas", "ResourceLimitExceeded: too many training jobs"),
    ("cannot reach the file system", "988 and 1018-1023", "ClientError: Unable to mount file system: fs-0337a79e, directory path: /efs/mtk. File system connection timed out. Please ensure that mount target IP address of file system is reachable and the security groups you associate with file system must allow inbound access on port 2049."),
    ("could not be mounted", "inputs.<channel>.path", "ClientError: Unable to mount file system: fs-0123456789abcdef0, directory path: /fsx/food. Incorrect mount path. Please ensure the mount path specified exists on the filesystem."),
    ("s3://bucket/food/train", "s3:ListBucket", 'An error occurred (ValidationException) when calling the CreateTrainingJob operation: No S3 objects found under S3 URL "s3://bucket/food/train" given in input data source. Please ensure that the bucket exists in the selected region (us-east-1), that objects exist under that S3 prefix, and that the role "arn:aws:iam::123456789012:role/SM" has "s3:ListBucket" permissions on bucket "bucket".'),
    ("image does not exist", "image.uri", "ClientError: Cannot pull algorithm container. Either the image does not exist or its permissions are incorrect."),
    ("image does not exist", "ecr:BatchGetImage", "Error response from daemon: manifest for 763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:9.9-cpu-py3 not found: manifest unknown"),
    ("compute.max_hours", "raise compute.max_hours", "MaxRuntimeExceeded"),
    ("compute.max_wait_hours", "raise compute.max_wait_hours", "MaxWaitTimeExceeded"),
    ("reclaimed the spot hosts", "checkpoints.s3", "Interrupted - The job stopped because the managed spot training instances were interrupted."),
    ("may not assume the role", "sts:AssumeRole", 'ClientError: Please ensure that the role "arn:aws:iam::123456789012:role/SM" exists and that its trust relationship policy allows the action "sts:AssumeRole" for the service principal "sagemaker.amazonaws.com".'),
    ("disk is full", "compute.volume_gb", "ClientError: Data download failed:Insufficient disk space"),
    ("disk is full", "compute.volume_gb", "ClientError: Artifact upload failed:Insufficient disk space"),
    ("reading s3://bucket/key", "s3:GetObject", "ClientError: Data download failed:Unable to download object s3://bucket/key (AccessDenied: Access Denied)"),
    ("ecr:BatchGetImage on arn:aws:ecr:me-central-1:272398656194:repository/x", "ecr:BatchGetImage", "<user> is not authorized to perform: ecr:BatchGetImage on resource: arn:aws:ecr:me-central-1:272398656194:repository/x because no resource-based policy allows the ecr:BatchGetImage action"),
    ("the disk is full (/dev/sda1)", "LAUNCHER_RUNS", "no space left on /dev/sda1, at /home/me/runs/quickstart-20261122-101500-abcd"),
    ("killed", "compute.instance_type", 'AlgorithmError: ExecuteUserScriptError:\nExitCode 137\nErrorMessage ""\nExtraInfo "OutOfMemory: Process killed by SIGKILL (signal 9)"'),
    ("a GPU ran out of memory", "hyperparameters.image_size", "AlgorithmError: rank 3: OutOfMemoryError: CUDA out of memory. Tried to allocate 1.17 GiB, exit code: 1"),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "fix", "line"), FROM_THE_LOG, ids=lambda value: None)
def test_a_line_of_the_log_is_explained(cause, fix, line):
    found = explain("AlgorithmError: , exit code: 1", [*BENIGN, line])
    assert cause in found.cause and fix in found.fix
    assert found.evidence and found.evidence in line


@pytest.mark.parametrize(("cause", "fix", "reason"), FROM_SAGEMAKER, ids=lambda value: None)
def test_sagemakers_reason_is_explained(cause, fix, reason):
    found = explain(reason, BENIGN)
    assert cause in found.cause and fix in found.fix
    assert found.evidence and found.evidence in reason
    assert explain(reason) == found


@pytest.mark.parametrize(
    "line",
    [
        "",
        "GPU memory 40 GiB, out of which 3 GiB are free",
        "host out of memory budget: none",
        "saved to s3://bucket/AccessDenied.txt",
        "UserWarning: No module named apex, using torch's own LayerNorm",
        "No module named in the config; taking vit_small_patch16_224",
        "algo-1:51:51 [0] NCCL INFO Call to connect returned Connection refused, retrying",
        "dlopen: libnccl-net.so: cannot open shared object file: No such file or directory",
        "epoch 1/3 step 137/400 loss 1.3700",
        "the job may be interrupted: spot instances",
        "validation loss is 0.3",
        "ExitCode 1",
    ],
)
def test_a_harmless_line_explains_nothing(line):
    assert explain("", [line]) is None
    assert explain(line) is None


def test_a_harmless_log_or_nothing_at_all_explains_nothing():
    assert explain("") is None
    assert explain("", BENIGN) is None
    assert explain("AlgorithmError: ExecuteUserScriptError:\nExitCode 1", BENIGN + CHILD_FAILED) is None


def test_the_first_error_in_time_wins_over_what_follows_from_it():
    out_of_memory = [f"[rank3]: {line}" for line in OUT_OF_MEMORY]
    full = "OSError: [Errno 28] No space left on device"
    assert "GPU ran out of memory" in explain("", BENIGN + out_of_memory + WATCHDOG + [full]).cause
    assert "disk is full" in explain("", [full] + BENIGN + out_of_memory + WATCHDOG).cause


def test_what_a_script_may_print_and_go_on_explains_only_its_end():
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'cache.npy'"
    assert "cache.npy" in explain("", [*BENIGN, missing]).cause
    went_on = [missing, *(f"epoch {number} done" for number in range(LAST_LINES)), "ExitCode -11"]
    assert "native code" in explain("", went_on).cause
    raised = lines("""
        Traceback (most recent call last):
          File "train.py", line 5, in <module>
            load()
        ValueError: the batch is odd
    """)
    assert explain("", [missing, *raised]) is None


def test_a_missing_module_is_explained_with_how_this_host_gets_one():
    line = "ModuleNotFoundError: No module named 'sklearn'"
    found = explain("", [line], packages="pip install what provides {module}")
    assert found.fix.startswith("pip install what provides sklearn; if sklearn is your own, set source")


def test_a_broken_connection_before_the_reason_does_not_win_either():
    assert "GPU ran out of memory" in explain("", WATCHDOG + OUT_OF_MEMORY).cause
    killed = 'ExtraInfo "OutOfMemory: Process killed by SIGKILL (signal 9)"'
    assert "killed" in explain("", [*WATCHDOG, killed]).cause


def test_an_unknown_traceback_is_not_explained_by_what_followed_from_it():
    unknown = lines("""
        [rank3]: Traceback (most recent call last):
        [rank3]:   File "train.py", line 5, in <module>
        [rank3]:     check(batch)
        [rank3]: ValueError: the batch is odd
    """)
    assert explain("", unknown + WATCHDOG + ["algo-2 exited with code 137"]) is None
    assert explain("AlgorithmError: rank 3: ValueError: the batch is odd", WATCHDOG) is None
    timed_out = lines("""
        [rank0]: Traceback (most recent call last):
        [rank0]:   File "train.py", line 5, in <module>
        [rank0]:     dist.all_reduce(x)
        [rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled system error
    """)
    assert "reach each other" in explain("", timed_out).cause


def test_what_the_service_says_wins_over_the_log():
    assert "max_hours" in explain("MaxRuntimeExceeded", WATCHDOG + OUT_OF_MEMORY).cause


def test_the_log_wins_over_what_one_host_gave_as_its_reason():
    reason = "AlgorithmError: rank 0: ModuleNotFoundError: No module named 'timm'"
    assert "GPU ran out of memory" in explain(reason, OUT_OF_MEMORY).cause
    assert "timm" in explain(reason, BENIGN).cause


def test_the_evidence_has_no_prefix_and_is_short():
    found = explain("", ["[1,mpirank:3,algo-2]<stderr>:[rank3]: " + OUT_OF_MEMORY[-1] + "x" * 5000])
    assert found.evidence.startswith("torch.cuda.OutOfMemoryError") and len(found.evidence) <= 500


def test_a_long_log_takes_seconds_at_most():
    start = time.process_time()  # without what other processes take
    explain(
        "",
        [f"epoch 1/3 step {number}/400 loss 2.3025 learning_rate 0.0001 images/s 812.4" for number in range(20_000)],
    )
    assert time.process_time() - start < 10


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(TEXTS, st.lists(TEXTS, max_size=30))
@example("is not authorized to perform: s3:GetObject on resource: {x}", ["{", "Traceback (most recent call last):"])
def test_no_text_makes_it_raise(reason, log):
    assert isinstance(first_traceback(log), str)
    found = explain(reason, log)
    assert found is None or isinstance(found, Explanation)
    assert found is None or (found.cause and found.fix and found.evidence)


# --- the table

KNOWN = yaml.safe_load((ROOT / "launcher/record/failure_causes.yaml").read_text())


def config_keys() -> set[str]:
    """Every dotted key of a config, channels as <channel>, and every hyperparameter of this kit's scripts."""

    def walk(model, prefix):
        for name, item in model.model_fields.items():
            yield prefix + name
            for part in re.findall(r"launcher\.config\.sections\.(\w+)", repr(item.annotation)):
                yield from walk(getattr(sections, part), f"{prefix}{name}.")

    keys = {key.replace("inputs.", "inputs.<channel>.") for key in walk(Job, "")}
    for one in (*vars(distillation).values(), *vars(scripts).values(), *vars(segmentation).values()):
        keys |= {f"hyperparameters.{name}" for name in getattr(one, "__dataclass_fields__", {})}
    return keys


def test_every_config_key_in_a_fix_exists():
    keys = config_keys()
    sections = "compute|hyperparameters|inputs|network|image|checkpoints|environment"
    for entry in KNOWN:
        for key in re.findall(rf"\b(?:{sections})\.[a-z_<>.]*[a-z0-9_>]", entry["cause"] + " " + entry["fix"]):
            assert key in keys or key == "inputs.<channel>", f"{key} in {entry['fix']!r}"


def test_a_command_without_a_config_is_told_no_key_of_one():
    keys = re.compile(
        r"\b(?:compute|hyperparameters|inputs|network|image|checkpoints)\b[.:]|\b(?:under|set) (?:inputs|environment)"
    )
    for _, _, line in FROM_THE_LOG:
        found = explain("", [line], config=False)
        assert found.fix and not keys.search(found.fix), found.fix
    assert explain("", ["Interrupted by the user"], config=False) is None, "no spot host"


def test_every_known_cause_has_a_source_and_an_example_here():
    examples = [line for _, _, line in FROM_THE_LOG] + [
        line for _, _, text in FROM_SAGEMAKER for line in text.split("\n")
    ]
    for entry in KNOWN:
        assert set(entry) - {"without_config"} == {"kind", "texts", "cause", "fix", "source"}
        assert entry["kind"] in ("service", "script", "killed", "network", "end")
        assert entry["source"].startswith("https://")
        assert any(re.search("|".join(entry["texts"]), line) for line in examples), entry["cause"]

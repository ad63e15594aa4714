"""What SageMaker would refuse, ignore or fail on late is found offline, each with its level, its place and its fix."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from training.models import fp8

import launcher
from launcher.aws import catalog, cluster, limits, validation
from launcher.config.issues import Issue
from launcher.config.job_issues import SDK_NAMES, _field_at
from launcher.planner import groups
from tests.aws.jobs import CPU, FSX, G5, GROUPED, GROUPS, KIT, P3, P4D, REMOTE, S3, TAUGHT, VPC, changed

US_WEST_2 = "763104351884.dkr.ecr.us-west-2.amazonaws.com"


DALI = {"model": "resnet18", "preprocessing": "dali"}

KEPT = f"{S3}checkpoints"


# What is changed in GOOD; then the issue's key, a piece of `found` and a piece of `fix`.
ERRORS = [
    # -- what SageMaker needs
    ({"role": None}, "role", "missing", "add role: arn:aws:iam::"),
    ({"region": None}, "region", "missing", "add region: us-west-2"),
    ({"output": None}, "output", "missing", "add output: s3://"),
    ({"image": None}, "image", "missing", "framework_version"),
    ({"compute": {"price_per_hour": 1.0}}, "compute.instance_type", "missing", "instance_type: ml."),
    # -- names and keys
    ({"name": "kt_food_tag"}, "name", "kt_food_tag", "write name: kt-food-tag"),
    ({"name": "x" * 90}, "name", "xxx", f"write name: {'x' * 42}"),
    ({"compute.use_spot_instance": True}, "compute.use_spot_instance", "unknown key", "did you mean compute.spot, which SageMaker's SDK calls use_spot_instances?"),
    ({"use_spot_instance": True}, "use_spot_instance", "unknown key", "did you mean compute.spot"),
    ({"inputs.train.use_spot_instance": True}, "inputs.train.use_spot_instance", "unknown key", "did you mean compute.spot"),
    ({"compute.spott": True}, "compute.spott", "unknown key", "did you mean spot?"),
    ({"compute.volume_size": 50}, "compute.volume_size", "unknown key", "did you mean compute.volume_gb, which"),
    ({"spot": True}, "spot", "unknown key", "did you mean compute.spot?"),
    ({"compute.distribution": "torchrun"}, "compute.distribution", "unknown key", "did you mean distribution?"),
    ({"network": {"subnet": []}}, "network.subnet", "unknown key", "did you mean subnets?"),
    ({"profiling": {"system_intervall_ms": 500}}, "profiling.system_intervall_ms", "unknown key", "did you mean system_interval_ms?"),
    ({"compute.zzz": 1}, "compute.zzz", "unknown key", "remove it"),
    ({"profiling": {"system_interval_ms": 123}}, "profiling.system_interval_ms", "123", "system_interval_ms: 500"),
    ({"compute.instance_type": "p4d.24xlarge"}, "compute.instance_type", "p4d.24xlarge", "ml.p4d.24xlarge"),
    ({"role": "SageMakerTraining"}, "role", "SageMakerTraining", "arn:aws:iam::"),
    # -- hosts
    ({"compute.instance_type": "ml.p4.24xlarge"}, "compute.instance_type", "ml.p4.24xlarge: SageMaker has no such instance type", "did you mean ml.p4d.24xlarge?"),
    ({"compute.volume_key": "alias/mine"}, "compute.volume_key", "local disks", "remove volume_key"),
    ({"compute.volume_key": "a key!", "compute.instance_type": P3}, "compute.volume_key", "a key!", "correct the key"),
    ({"output_key": "a key!"}, "output_key", "a key!", "correct the key"),
    ({"compute.training_plan": "mine"}, "compute.training_plan", "mine", "list-training-plans"),
    ({"compute.instance_groups": GROUPS}, "compute.instance_type", "beside instance_groups", "or the groups"),
    ({"compute": {"instance_groups": [GROUPS[0], GROUPS[0]], "training_groups": ["gpus"]}}, "compute.instance_groups", "two groups with the same name", "rename one"),
    ({"compute": {**GROUPED, "price_per_hour": 32.77}}, "compute.price_per_hour", "groups of different instance types", "--check"),
    ({"compute": {**GROUPED, "training_groups": ["gpu"]}}, "compute.training_groups", "no group gpu", "did you mean gpus?"),
    ({"compute": {"instance_groups": GROUPS}}, "compute.training_groups", "0 groups for smddp", "training_groups: [gpus]"),
    ({"compute": {"instance_groups": GROUPS[::-1]}, "distribution": "torchrun"}, "compute.training_groups", "0 groups for torchrun: the container toolkit would train a separate model in each", "training_groups: [gpus]"),
    ({"compute": {**GROUPED, "training_groups": ["gpus", "cpus"]}, "distribution": "torchrun"}, "compute.training_groups", "2 groups for torchrun", "training_groups: [gpus]"),
    ({"compute": {**GROUPED, "instance_count": 3}}, "compute.instance_count", "3, beside instance_groups", "remove it"),
    ({**KIT, "compute": GROUPED, "distribution": "none"}, "distribution", "none, with 2 hosts", "torchrun"),
    ({"compute": {**GROUPED, "keep_alive_minutes": 5}}, "compute.keep_alive_minutes", "several instance groups", "remove keep_alive_minutes"),
    ({"compute": GROUPED, "distribution": "none", "compute.training_groups": [], "image": {"framework_version": "1.9.1", "python": "py38"}}, "compute.instance_groups", "several groups with PyTorch 1.9.1", "use a newer image"),
    ({**KIT, "compute": GROUPED}, "compute.instance_groups", "the hosts of cpus would train a separate model", "worker_type: remote and training_groups: [gpus]"),
    ({**REMOTE, "compute.instance_groups": GROUPS[:1]}, "hyperparameters.worker_type", "remote, but every host trains", "or write worker_type: auto"),
    ({**REMOTE, "compute": {"instance_type": G5}}, "hyperparameters.worker_type", "remote, but every host trains", "add a group"),
    ({**REMOTE, "compute.training_groups": [], "distribution": "none"}, "compute.training_groups", "0 groups for worker_type: remote", "training_groups: [gpus]"),
    ({**REMOTE, "inputs.train.instance_groups": ["gpus"], "inputs.validation.instance_groups": ["gpus"]}, "inputs.train.instance_groups", "cpus without train", "add cpus"),
    ({**REMOTE, "inputs.train.instance_groups": ["gpus", "cpus"], "inputs.validation.instance_groups": ["cpus"]}, "inputs.validation.instance_groups", "gpus without validation", "add gpus"),
    ({**KIT, "distribution": "torchrun", "inputs.train.sharded": True}, "inputs.train.sharded", "needs all of it on each of them", "FastFile"),
    ({**REMOTE, "inputs.train.sharded": True}, "inputs.train.sharded", "a host would lack the images of the others", "FastFile"),
    ({**TAUGHT, "inputs.teacher.instance_groups": ["gpus"]}, "inputs.teacher.instance_groups", "cpus without teacher", "add cpus"),
    ({**TAUGHT, "inputs.teacher.sharded": True}, "inputs.teacher.sharded", "a host would lack files of the others", "FastFile"),
    ({"compute": GROUPED, "inputs.train.instance_groups": ["gpu"]}, "inputs.train.instance_groups", "no group gpu", "did you mean gpus?"),
    ({"compute": GROUPED, "inputs.train.instance_groups": ["gpus"]}, "inputs.validation", "on every channel or on none", "add instance_groups: [gpus, cpus]"),
    ({"compute": GROUPED, "inputs.validation.instance_groups": ["gpus"], "inputs.train": FSX, "network": VPC}, "inputs.train", "a file system goes to all groups", "remove instance_groups"),
    # -- time, spot, warm pools, checkpoints
    ({"compute.spot": True, "checkpoints": KEPT, "compute.max_hours": 6.0, "compute.max_wait_hours": 5.0}, "compute.max_wait_hours", "5 h, less than max_hours (6 h)", "max_wait_hours: 12"),
    ({"compute.max_wait_hours": 5.0}, "compute.max_wait_hours", "without spot", "spot: true"),
    ({"compute.keep_alive_minutes": 5, "compute.spot": True, "checkpoints": KEPT}, "compute.keep_alive_minutes", "a warm pool with spot", "remove keep_alive_minutes or spot"),
    ({"checkpoints": {"s3": KEPT, "path": "/opt/ml/model/state"}}, "checkpoints.path", "another use in the container", "remove path; the default is /opt/ml/checkpoints"),
    ({**KIT, "checkpoints": S3}, "checkpoints", "holds output, inputs.train, inputs.validation too, which SageMaker would copy to every host", f"write checkpoints: {S3}checkpoints"),
    ({**KIT, "checkpoints": f"{S3}runs"}, "checkpoints", "holds output too", f"write checkpoints: {S3}runs/checkpoints"),
    ({**KIT, "output": f"{S3}kt/checkpoints", "checkpoints": f"{S3}kt"}, "checkpoints", "holds output too", f"write checkpoints: {S3}checkpoints-of-test"),
    ({**KIT, "checkpoints": {"s3": KEPT, "path": "/opt/ml/saved"}}, "checkpoints.path", "/opt/ml/saved would hold no checkpoint", "remove path; the default is /opt/ml/checkpoints"),
    ({"compute.max_hours": 700.0}, "compute.max_hours", "700", "max_hours: 672"),
    # -- how training is spread
    ({"compute.instance_type": G5}, "distribution", f"smddp on {G5}", "write distribution: torchrun (nccl uses EFA there)"),
    ({"compute.instance_type": "ml.p5.48xlarge"}, "distribution", "smddp on ml.p5.48xlarge", "torchrun"),
    ({"compute.instance_type": P3}, "distribution", "library of PyTorch 2.0.1 (2.0.1) no longer runs there", "torchrun"),
    ({"image": {"framework_version": "2.6.0", "python": "py312"}}, "distribution", "smddp with PyTorch 2.6.0", "torchrun, or use an image of one of these versions"),
    ({"image": {"framework_version": "2.0", "python": "py310"}}, "distribution", "smddp with PyTorch 2.0: the image's library depends on the patch version", 'in full: "2.0.1"'),
    ({"custom_mpi_options": "-verbose", "distribution": "torchrun"}, "custom_mpi_options", "ignored with distribution: torchrun", "smddp"),
    ({"distribution": "torchrun", "compute.processes_per_host": 9}, "compute.processes_per_host", "9 processes for the 8 GPUs", "null"),
    ({"compute.processes_per_host": 4}, "compute.processes_per_host", "one process per GPU", "remove processes_per_host"),
    ({"compute.instance_type": P3, "distribution": "torchrun", "hyperparameters": {"dtype": "bf16"}}, "hyperparameters.dtype", "bf16 on V100", "fp16 or fp32"),
    ({"compute.instance_type": P3, "distribution": "torchrun", "hyperparameters": {"precision": "tf32"}}, "hyperparameters.precision", "tf32 on V100", "fp16 or fp32"),
    ({"compute.instance_type": P3, "distribution": "torchrun", "hyperparameters": {"teacher_precision": "fp8"}}, "hyperparameters.teacher_precision", "fp8 on V100", "fp16 or fp32, or use ml.g6"),
    ({"compute.instance_type": G5, "distribution": "torchrun", "hyperparameters": {"teacher_precision": "fp8"}}, "hyperparameters.teacher_precision", "fp8 on A10G", "bf16, or use ml.g6"),
    ({**KIT, "compute.instance_type": "ml.p5.48xlarge", "distribution": "torchrun", "hyperparameters": {"student": "vit_small_patch16_224", "teacher_precision": "fp8"}}, "hyperparameters.teacher_precision", "fp8 with PyTorch 2.0.1, which is too old", "use a newer image, or write teacher_precision: null"),
    ({**TAUGHT, "compute": {"instance_groups": [GROUPS[0], {**GROUPS[1], "instance_type": G5}], "training_groups": ["gpus"]}, "hyperparameters.teacher_precision": "fp8"}, "hyperparameters.teacher_precision", "fp8 on A10G", "bf16, or use ml.g6"),
    ({**KIT, "hyperparameters": {"student": "vit_small_patch16_224", "gradient_compression": "bf16"}}, "hyperparameters.gradient_compression", "bf16 with smddp", "gradient_compression: none"),
    ({"hyperparameters": {"global_batch_size": 100}}, "hyperparameters.global_batch_size", "100 images do not divide evenly among 16 processes", "96 or 112"),
    # -- the image
    ({"image": {"framework_version": "2.0.2", "python": "py310"}}, "image", "2.0.2", "image.framework_version"),
    ({"region": "eu-west-1", "image": {"uri": f"{US_WEST_2}/pytorch-training:2.0.1-gpu-py310"}}, "image.uri", "an image in us-west-2 for a job in eu-west-1", f"write {US_WEST_2.replace('us-west-2', 'eu-west-1')}/pytorch-training:2.0.1-gpu-py310"),
    ({"region": "eu-central-2", "image": {"uri": f"{US_WEST_2}/pytorch-training:2.0.1-gpu-py310"}}, "image.uri", "an image in us-west-2", "write 380420809688.dkr.ecr.eu-central-2.amazonaws.com/pytorch-training:2.0.1-gpu-py310"),
    ({"region": "eu-central-2", "image": {"uri": f"{US_WEST_2.replace('us-west-2', 'eu-central-2')}/pytorch-training:2.0.1-gpu-py310"}}, "image.uri", "is not AWS's registry in eu-central-2", "write 380420809688.dkr.ecr.eu-central-2"),
    ({"region": "cn-north-1", "image": {"uri": "727897471807.dkr.ecr.cn-north-1.amazonaws.com/pytorch-training:2.0.1-gpu-py310"}}, "image.uri", "is not AWS's registry in cn-north-1", "write 727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch-training:2.0.1"),
    ({"region": "eu-central-2", "image": {"uri": "520713654638.dkr.ecr.us-west-2.amazonaws.com/sagemaker-pytorch:1.1.0-gpu-py3"}}, "image.uri", "an image in us-west-2 for a job in eu-central-2", "in a registry of yours in eu-central-2, and copy the image there first"),
    ({"image": {"uri": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/mine:1"}}, "image.uri", "an image in eu-west-1", "copy the image there first"),
    ({"image": {"uri": f"{US_WEST_2}/pytorch-training:2.3.0-gpu-py311-cu121-ubuntu20.04-ec2"}}, "image.uri", "for EC2", "ends in -sagemaker"),
    ({**KIT, "image": {"framework_version": "1.13.1", "python": "py39"}}, "image", "PyTorch 1.13.1 with py39", "2.0.1"),
    ({**KIT, "script": "train_kd.py", "hyperparameters": {"student": "resnet18", "teacher_cache": {"views": 2}}}, "hyperparameters.teacher_cache", "among the checkpoints, and the job keeps none", "add checkpoints:"),
    ({**KIT, "script": "train_kd.py", "hyperparameters": {"student": "resnet18", "teacher_cache": {"views": 2, "where": "channel:bank"}}, "inputs.bank": {"run": "earlier"}}, "hyperparameters.teacher_cache", "among the checkpoints, and the job keeps none", "channel:NAME"),
    ({"compute.instance_type": P3, "distribution": "torchrun", "image": {"framework_version": "2.10.0", "python": "py313"}}, "image", "PyTorch 2.10.0 on V100 (ml.p3.16xlarge): its CUDA 13 does not support that GPU", "2.6.0"),
    ({**KIT, "hyperparameters": DALI}, "hyperparameters.preprocessing", "dali with PyTorch 2.0.1, whose image has CUDA 11", "2.14.0"),
    ({**KIT, "hyperparameters": DALI, "image": {"uri": f"{US_WEST_2}/pytorch-training:2.0.0-gpu-py310-cu118-ubuntu20.04-sagemaker"}}, "hyperparameters.preprocessing", "dali with PyTorch 2.0.0", "preprocessing: cpu"),
    # -- data
    ({**KIT, "inputs.train.mode": "Pipe"}, "inputs.train.mode", "this kit's scripts read files", "FastFile"),
    ({"inputs.train": {"s3": f"{S3}m.json", "data_type": "AugmentedManifestFile", "attributes": ["source-ref"]}}, "inputs.train.data_type", "without Pipe mode", "add them"),
    ({"inputs.train.attributes": ["source-ref"]}, "inputs.train.attributes", "without an augmented manifest", "AugmentedManifestFile"),
    ({"inputs.train.compression": "Gzip"}, "inputs.train.compression", "Gzip without Pipe mode", "remove compression"),
    ({"inputs.train.record_wrapper": "RecordIO", "inputs.train.mode": "File"}, "inputs.train.record_wrapper", "RecordIO without Pipe mode", "remove record_wrapper"),
    ({"inputs.train": FSX}, "inputs.train", "FSx for Lustre without network.subnets", "add network: {subnets:"),
    ({"inputs.train": {"efs": "fs-0123456789abcdef0", "path": "/train"}}, "inputs.train", "EFS without network.subnets", "add network: {subnets:"),
    ({"inputs.train": {**FSX, "mode": "FastFile"}}, "inputs.train", "mode with fsx, but only data in S3 can have it", "remove mode"),
    ({"inputs.train": {"s3": S3, "folder": "data"}}, "inputs.train", "folder and s3", "give exactly one"),
    ({"inputs.train": "s3://amzn-s3-demo-bucket/x"}, "inputs.train", "s3://", "{s3: s3://amzn-s3-demo-bucket/x}"),
    ({"inputs.a b": {"s3": S3}}, "inputs.a b", "not a valid channel name", "rename it"),
    # -- network
    ({"network": {"subnets": ["subnet-0a1b2c3d"]}}, "network", "security_groups missing", "add security_groups"),
    ({"network": {"security_groups": ["sg-0a1b2c3d"]}}, "network", "subnets missing", "add subnets"),
    ({"network": {**VPC, "subnets": ["vpc-0a1b2c3d"]}}, "network.subnets", "vpc-0a1b2c3d", "correct the id"),
    ({"network": {**VPC, "security_groups": ["default"]}}, "network.security_groups", "default", "correct the id"),
    ({**KIT, "distribution": "torchrun", "network": {"isolation": True}}, "network.isolation", "holds requirements.txt", "image"),
    ({"compute": GROUPED, "distribution": "torchrun", "network": {"isolation": True}, "inputs": {"train": {"s3": f"{S3}train/", "instance_groups": ["gpus"]}}}, "network.isolation", "the code comes as a channel for all groups", "remove instance_groups from the channels"),
    ({"network": {"isolation": True}, "inputs.code": {"s3": S3}}, "inputs.code", "the code uses a channel of this name", "rename yours"),
    # -- Debugger and Profiler
    ({"profiling": {"rules": {"ProfilerRaport": {}}}}, "profiling.rules.ProfilerRaport", "no such rule", "did you mean ProfilerReport?"),
    ({"profiling": {"rules": {"CPUBottleneck": {"treshold": 1}}}}, "profiling.rules.CPUBottleneck.treshold", "no such parameter", "did you mean threshold?"),
    ({"profiling": {"rules": {"ProfilerReport": {"CPUBottleneck_treshold": 1}}}}, "profiling.rules.ProfilerReport.CPUBottleneck_treshold", "no such parameter", "did you mean CPUBottleneck_threshold?"),
    ({"profiling": {"rules": {"ProfilerReport": {}}}, "region": "eu-south-2"}, "profiling.rules", "no image sagemaker-debugger-rules:latest in the region eu-south-2", "do without its rules"),
    ({"profiling": {"profiler": {}}, "region": "sa-east-1"}, "profiling.profiler", "no image detailed-profiler-processing:latest", "choose one of these regions"),
    ({"debugger": {}, "checkpoints": KEPT}, "debugger", "not available in distributed training", "remove debugger: or checkpoints:"),
    ({"debugger": {}, **KIT, "script": "train_kd.py"}, "debugger", "with a frozen teacher", "remove debugger:"),
    # -- sizes
    ({"hyperparameters": {"text": "x" * 5000}}, "hyperparameters.text", "5002 characters as JSON", "a file in an input channel"),
    ({"hyperparameters": {f"h{number}": 1 for number in range(101)}}, "hyperparameters", "101 hyperparameters", "a file in an input channel"),
    ({"hyperparameters": {f"h{number}": 1 for number in range(95)}}, "hyperparameters", "103 hyperparameters, with 8 of the container toolkit", "a file in an input channel"),
    ({"custom_mpi_options": "x" * 2499}, "custom_mpi_options", "2501 characters", "shorten it"),
    ({"inputs": {f"c{number}": {"s3": S3} for number in range(21)}}, "inputs", "21 entries", "remove some"),
    ({"inputs": {f"c{number}": {"s3": S3} for number in range(20)}, "network": {"isolation": True}}, "inputs", "20 entries", "remove some"),
    ({"tags": {f"t{number}": "" for number in range(51)}}, "tags", "51 entries", "remove some"),
    ({"environment": {f"E{number}": "" for number in range(101)}}, "environment", "101 entries", "remove some"),
    ({"environment": {"E": "x" * 513}}, "environment.E", "513 characters", "shorten it"),
    ({"metrics": {f"m{number}": "(.)" for number in range(41)}}, "metrics", "41 entries", "remove some"),
    ({"debugger": {"collections": {f"c{number}": {} for number in range(21)}}}, "debugger.collections", "21 entries", "remove some"),
    ({"inputs.train": {"s3": S3, "data_type": "AugmentedManifestFile", "mode": "Pipe", "attributes": ["a"] * 17}}, "inputs.train.attributes", "17 entries", "remove some"),
    ({"tags": {"a\nb": ""}}, "tags.a\nb", "not a valid tag name", "rename it"),
    ({"tags": {"AWS:x": ""}}, "tags.AWS:x", "not a valid tag name", "rename it"),
    ({"tags": {"team": "a;b"}}, "tags.team", "a;b", "use only these characters"),
    ({"metrics": {"loss": "("}}, "metrics.loss", "missing )", "correct the regular expression"),
    ({"metrics": {"loss": "loss [0-9]+"}}, "metrics.loss", "0 groups", "write ( ) around"),
    ({"metrics": {"loss": "(" + "." * 499 + ")"}}, "metrics.loss", "too long", "shorten it"),
]  # fmt: skip


WARNINGS = [
    ({**KIT, "hyperparameters": DALI, "distribution": "torchrun", "compute.instance_type": CPU, "image": {"framework_version": "2.8.0", "python": "py312"}}, "hyperparameters.preprocessing", "dali on ml.m5.xlarge, which has no GPU", "preprocessing: cpu"),
    ({"compute.volume_gb": 500}, "compute.volume_gb", "8000 GB of local storage", "remove volume_gb"),
    ({"checkpoints": f"{S3}runs"}, "checkpoints", "holds output too", f"write checkpoints: {S3}runs/checkpoints"),
    ({"compute": {**GROUPED, "instance_groups": [GROUPS[0], {**GROUPS[1], "instance_type": G5}], "volume_gb": 500}}, "compute.volume_gb", f"{P4D} has 8000 GB and {G5} has 3800 GB of local storage", "remove volume_gb"),
    ({"compute.max_hours": 121.0}, "compute.max_hours", "the default quota is 120 h a job", "request a higher quota"),
    ({"compute.spot": True, "compute.max_hours": 0.5}, "compute.spot", "spot without checkpoints, for up to 1 h", "add checkpoints:"),
    ({"compute.spot": True}, "compute.spot", "spot without checkpoints, for up to 48 h", "add checkpoints: s3://"),
    ({"distribution": "none"}, "distribution", "none, with 2 hosts", "torchrun"),
    ({"compute": GROUPED, "distribution": "none"}, "distribution", "none, with 2 hosts", "torchrun"),
    ({"image": {"uri": "public.ecr.aws/deep-learning-containers/pytorch-training:2.0.1-gpu-py310"}}, "image.uri", "public gallery", "from us-west-2's registry"),
    ({"compute.instance_type": P3, "distribution": "torchrun", "image": {"framework_version": "2.8.0", "python": "py312"}}, "image", "PyTorch 2.8.0 on V100 (ml.p3.16xlarge): its build may leave that GPU out", "2.6.0"),
    ({"metrics": {"loss": "loss (([0-9.]+)|nan)"}}, "metrics.loss", "2 groups in", "(?: )"),
    ({"hyperparameters": {"num_workers": 13}}, "hyperparameters.num_workers", "13 data workers for each of 8 processes on 96 vCPUs", "num_workers: 12"),
    ({**REMOTE, "compute.instance_groups": [GROUPS[0], {**GROUPS[1], "instance_type": G5}]}, "compute.instance_groups.1.instance_type", f"{G5} for cpus, whose hosts preprocess on their CPUs", "without GPUs"),
    ({**KIT, "distribution": "none", "compute.instance_count": 1}, "distribution", "one process uses one of its 8 GPUs", "torchrun"),
    ({"image": {"uri": f"{US_WEST_2}/pytorch-training:2.0.1-cpu-py310"}}, "image.uri", "its GPUs would stay idle", "-gpu-"),
    ({"image": {"uri": f"{US_WEST_2}/pytorch-training:2.0.1-gpu-py310"}, "compute.instance_type": CPU, "distribution": "torchrun"}, "image.uri", "which has no GPU", "-cpu-"),
    ({**KIT, "network": VPC}, "network.subnets", "need a route to PyPI", "NAT gateway"),
    ({"network": {"encrypt_traffic": True}}, "network.encrypt_traffic", "slows distributed training", "remove it unless"),
    ({"network": {"encrypt_traffic": True}, "compute": GROUPED}, "network.encrypt_traffic", "slows distributed training", "remove it unless"),
    ({**REMOTE, "compute.instance_groups": [{**GROUPS[0], "instance_count": 1}, GROUPS[1]], "distribution": "none", "network": {"encrypt_traffic": True}}, "network.encrypt_traffic", "slows distributed training", "remove it unless"),
    ({"profiling": {}}, "profiling", "closed to new customers since 2026-07-30", "remove profiling:"),
    ({"profiling": {"profiler": {}}}, "profiling.profiler", "ends on 2027-06-30", "remove profiler:"),
    ({"debugger": {}}, "debugger", "closed to new customers since 2026-07-30", "remove debugger:"),
]  # fmt: skip


NOT_CHECKED = [
    ({"image": {"uri": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"}}, "image", "mine:1: not one of AWS's images", "container toolkit"),
    ({"image": {"uri": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"}}, "distribution", "whether the image holds SageMaker's data parallel library", "import smdistributed.dataparallel"),
    ({**KIT, "hyperparameters": DALI, "image": {"uri": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"}}, "hyperparameters.preprocessing", "whether the image holds NVIDIA's package", "pip install nvidia-dali-cuda120"),
    ({"hyperparameters": {"epochs": 1}}, "hyperparameters", "train.py declares no settings class", "docs/your-own-script.md"),
]  # fmt: skip


FINE = [
    {"distribution": "torchrun", "compute.instance_type": CPU, "image": {"framework_version": "2.8.0", "python": "py312"}},
    {"distribution": "torchrun", "compute.instance_type": G5},
    {"distribution": "torchrun", "compute.instance_type": "ml.p5.48xlarge", "image": {"framework_version": "2.8.0", "python": "py312"}},
    {"compute.instance_type": P3, "image": {"framework_version": "2.0.0", "python": "py310"}},
    {"compute": GROUPED},
    {"compute": {**GROUPED, "volume_gb": 500}},
    {"compute": GROUPED, "distribution": "torchrun"},
    {"compute": {"instance_groups": GROUPS}, "distribution": "none"},
    {"compute": {"instance_groups": GROUPS[:1]}, "distribution": "torchrun"},
    REMOTE,
    {**REMOTE, "inputs.train.instance_groups": ["gpus", "cpus"], "inputs.validation.instance_groups": ["gpus"]},
    {**TAUGHT, "compute.instance_groups": [GROUPS[0], {**GROUPS[1], "instance_type": G5}]},
    {"compute": GROUPED, "inputs.train.instance_groups": ["gpus"], "inputs.validation.instance_groups": ["cpus"]},
    {"compute.spot": True, "checkpoints": KEPT},
    {"compute.spot": True, "checkpoints": KEPT, "compute.max_hours": 6.0, "compute.max_wait_hours": 6.0},
    {"checkpoints": {"s3": KEPT, "path": "/opt/ml/saved"}},
    {**KIT, "checkpoints": {"s3": KEPT, "path": "/opt/ml/checkpoints/"}},
    {"compute.keep_alive_minutes": 60},
    {**TAUGHT, "image": {"framework_version": "2.9.0", "python": "py312"}, "hyperparameters.teacher_precision": "fp8"},  # by the CPUs, not by the A100s
    {"inputs.train": FSX, "network": VPC},
    {"network": {"isolation": True}},
    {"profiling": {"rules": {"ProfilerReport": {"CPUBottleneck_threshold": 90}}}},
    {"debugger": {}},
    {"hyperparameters": {f"h{number}": 1 for number in range(92)}},
    {"tags": {"team: ü": "a b"}},
    {"metrics": {}},
]  # fmt: skip
"""Nothing of these is refused."""


def issues(values: dict[str, Any]) -> list[Issue]:
    """What is reported of a config for SageMaker, valid or not."""
    try:
        return list(launcher.plan(launcher.from_values(values), on="aws").issues)
    except launcher.UserError as error:
        return list(error.issues)


CASES = (
    [("error", *case) for case in ERRORS]
    + [("warning", *case) for case in WARNINGS]
    + [("not checked", *case) for case in NOT_CHECKED]
)


def short(value: Any) -> str:
    return str(value).replace("\n", " ")[:60]


@pytest.mark.parametrize(("level", "changes", "key", "found", "fix"), CASES, ids=short)
def test_a_mistake_is_reported_with_its_level_its_key_and_its_fix(good, level, changes, key, found, fix):
    reported = issues(changed(good, changes))
    assert [issue for issue in reported if issue.key == key and issue.level == level and found in issue.found and fix in issue.fix], "\n".join(f"{issue.level}: {issue}" for issue in reported)  # fmt: skip
    if level != "error":
        assert not [issue for issue in reported if issue.level == "error"]


@pytest.mark.parametrize("changes", FINE, ids=short)
def test_what_sagemaker_takes_is_not_refused(good, changes):
    assert [str(issue) for issue in issues(changed(good, changes)) if issue.level == "error"] == []


def test_a_good_config_has_no_finding_but_about_its_images_age_and_its_placeholders(good):
    reported = [(issue.level, issue.key) for issue in issues(good)]
    # 2.0.1 gets no patches any more, and the role and the buckets are examples
    assert reported == [("warning", "image"), ("warning", "role")]


def test_no_rule_is_without_a_case(good):
    """Every line of the rules that makes an Issue runs in at least one case above."""
    wanted = {
        (module.__file__, node.lineno)
        for module in (validation, cluster, limits, groups)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Issue", "warning")
    }
    files = {file for file, _ in wanted}
    run = set()

    def on_line(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        run.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        for _, changes, *_ in CASES:
            with contextlib.suppress(launcher.UserError):
                checked(launcher.from_values(changed(good, changes)))
    finally:
        sys.settrace(before)
    left = sorted(f"{Path(file).name}:{line}" for file, line in wanted - run)
    assert len(wanted) > 50 and left == []


def checked(job: launcher.Job) -> list[Issue]:
    return [*groups.check(job), *validation.check(job, kit_script=job.source is None, requirements=job.source is None)]


def test_what_the_sdk_calls_a_thing_is_answered_with_what_a_config_calls_it():
    from sagemaker.estimator import EstimatorBase, Framework
    from sagemaker.pytorch import PyTorch

    known = {name for made in (PyTorch, Framework, EstimatorBase) for name in inspect.signature(made.__init__).parameters}  # fmt: skip
    assert set(SDK_NAMES) <= known
    for ours in SDK_NAMES.values():
        assert _field_at(ours.split("."))[1] is not None, ours


def test_a_version_that_the_rules_propose_has_an_image():
    catalog.training_image("us-west-2", P4D, "2.0.1", "py310")
    catalog.training_image("us-west-2", P4D, "2.8.0", "py312")


@pytest.mark.parametrize("source", ["fsx", "efs"])
def test_a_file_systems_id_has_the_length_that_sagemakers_has(good, source):
    model = botocore.session.get_session().get_service_model("sagemaker").shape_for("FileSystemId").metadata
    assert (model["min"], model["max"]) == (len("fs-") + 8, len("fs-") + 18)
    for digits, fits in ((7, False), (8, True), (18, True), (19, False)):
        given = {"inputs": {"train": {source: f"fs-{'a' * digits}", "path": "/fsx/train"}}, "network": VPC}
        with contextlib.nullcontext() if fits else pytest.raises(launcher.UserError, match=f"inputs.train.{source}"):
            launcher.from_values(changed(good, given))


def test_the_launcher_and_the_scripts_agree_on_the_oldest_pytorch_with_fp8():
    assert cluster.FIRST_WITH_FP8 == fp8.MIN_TORCH

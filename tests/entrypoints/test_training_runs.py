"""The entry scripts for real: through the toolkit, on real images, on one host and on two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from training.data.loaders import open_loaders
from training.distributed.world import World
from training.models import timm_models
from training.teacher import frozen as teacher

import launcher
from tests.conftest import ROOT, assert_nothing_left, shared_store, wait_until
from tests.entrypoints.torch_versions import gloo_adds_bf16

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "in_chans": 1}
FAST = {"image_size": 16, "global_batch_size": 32, "max_steps": 6, "log_every": 2}
STUDENT = {"student": "vit_tiny_patch16_224", "student_options": {**TINY, "embed_dim": 12, "num_heads": 1}}


@pytest.fixture(scope="module")
def digits(prepared):
    return prepared("digits")


def job(digits, script: str, hyperparameters: dict, **values) -> launcher.Job:
    inputs = {name: {"folder": str(digits / name)} for name in ("train", "validation")} | values.pop("inputs", {})
    return launcher.from_values(
        {"name": "test", "script": script, "inputs": inputs, "hyperparameters": {**FAST, **hyperparameters}, **values}
    )


def classifier(digits, **values) -> launcher.Job:
    hyperparameters = {"model": "vit_tiny_patch16_224", "model_options": TINY, **values.pop("hyperparameters", {})}
    return job(digits, "train_classifier.py", hyperparameters, **{"name": "teacher", **values})


def finished(planned: launcher.Job) -> launcher.Run:
    run = launcher.run(launcher.plan(planned))
    assert run.wait(120) == "Completed", "\n".join(line for _, line in run.logs())
    return run


def weights(run: launcher.Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder.host("algo-1") / "model/model.safetensors")


SCHEDULE = {
    "max_steps": 3,
    "learning_rate": 0.02,
    "weight_decay": 0.3,
    "warmup_fraction": 0.34,
    "max_grad_norm": 0.5,
    "seed": 4,
}


@pytest.fixture(scope="module")
def both_runs(digits, made_once) -> tuple[launcher.Run, launcher.Run]:
    """Three steps of a teacher, and a student of that run, in a store of their own, which all of pytest's workers look at."""

    def make(folder: Path) -> None:
        with shared_store(folder):
            finished(classifier(digits, hyperparameters=SCHEDULE))
            finished(job(digits, "train_kd.py", STUDENT, name="student", inputs={"teacher": {"run": "teacher"}}))

    with shared_store(made_once("teacher-and-student", make)):
        return launcher.attach("teacher"), launcher.attach("student")


@pytest.fixture
def teacher_run(both_runs) -> launcher.Run:
    return both_runs[0]


@pytest.fixture
def student_run(both_runs) -> launcher.Run:
    return both_runs[1]


def test_a_teacher_is_trained_and_distilled_through_runs(teacher_run, student_run):
    result = student_run.result()
    trained = teacher_run.result()
    assert result["teacher"]["validation_accuracy"] == pytest.approx(trained["validation_accuracy"], abs=1e-9)
    assert result["parameters"] < trained["parameters"]
    lines = [metric for metric in student_run.metrics() if "loss" in metric]
    for metric in lines:
        assert metric["loss"] == pytest.approx(0.5 * metric["label_loss"] + 0.5 * metric["teacher_loss"], rel=1e-5)
    assert [metric["step"] for metric in lines] == [2, 4, 6]
    loaded = timm.create_model(f"local-dir:{student_run.folder.host('algo-1') / 'model'}", pretrained=True)
    assert all(torch.equal(value, weights(student_run)[name]) for name, value in loaded.state_dict().items())
    assert loaded.pretrained_cfg["label_names"] == [str(digit) for digit in range(10)]
    assert timm.data.resolve_model_data_config(loaded)["input_size"] == (1, 16, 16)


@pytest.mark.slow
def test_a_resume_on_other_images_is_refused_before_its_first_step(digits, tmp_path):
    """On SageMaker a job with `checkpoints:` goes on from what is there, also when its bucket has got new images meanwhile."""
    own = tmp_path / "digits"
    shutil.copytree(digits, own)
    first = finished(classifier(own, hyperparameters={"checkpoint_every": 3}))
    next((own / "train/0").iterdir()).unlink()
    again = launcher.run(launcher.resume(first.name))
    assert again.wait(120) == "Failed"
    [said] = [line for _, line in again.logs() if "belongs to another job: training images is" in line][:1]
    assert "start over with another `checkpoints`" in said


@pytest.mark.slow
def test_a_resume_with_another_teacher_is_refused_before_its_first_step(digits, tmp_path):
    """Another model may have taken its place in the folder, or in the bucket, meanwhile."""
    models = [finished(classifier(digits, hyperparameters={"max_steps": steps})) for steps in (1, 2)]
    place = tmp_path / "teacher"
    shutil.copytree(models[0].folder.host("algo-1") / "model", place)
    options = {"student": "vit_tiny_patch16_224", "student_options": TINY, "checkpoint_every": 3}
    first = finished(job(digits, "train_kd.py", options, inputs={"teacher": {"folder": str(place)}}))
    assert len(first.result()["teacher"]["digest"]) == 64
    shutil.rmtree(place)
    shutil.copytree(models[1].folder.host("algo-1") / "model", place)
    again = launcher.run(launcher.resume(first.name))
    assert again.wait(120) == "Failed"
    [said] = [line for _, line in again.logs() if "belongs to another job: teacher is" in line][:1]
    assert "start over with another `checkpoints`" in said


@pytest.mark.slow
def test_two_hosts_train_the_same_model_as_one(digits):
    """The global batch is the same, so the averaged gradients are, up to the order of sums."""
    options = {"hyperparameters": {"max_shift_pixels": 2, "max_grad_norm": None, "learning_rate": 0.01}}
    one = finished(classifier(digits, **options))
    two = finished(
        classifier(digits, distribution="torchrun", compute={"instance_count": 2, "processes_per_host": 2}, **options)
    )
    assert (one.result()["world_size"], two.result()["world_size"]) == (1, 4)
    assert any("4 processes on cpu, process group: gloo (there is no GPU)" in line for _, line in two.logs())
    start = finished(classifier(digits, hyperparameters={"max_steps": 1, "learning_rate": 1e-12}))
    moved = max((value - weights(start)[name]).abs().max().item() for name, value in weights(one).items())
    for name, value in weights(one).items():
        assert torch.allclose(value, weights(two)[name], atol=moved / 100), name
    assert two.result()["validation_loss"] == pytest.approx(one.result()["validation_loss"], rel=1e-3)
    assert [path.parent.name for path in two.folder.path.glob("hosts/*/opt/ml/output/data/*/result.json")] == [
        "127.0.0.1"
    ]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(digits):
    first, second, other = (
        finished(classifier(digits, hyperparameters={"seed": seed, "max_steps": 2})) for seed in (1, 1, 2)
    )
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())
    assert not all(torch.equal(value, weights(other)[name]) for name, value in weights(first).items())


@pytest.mark.slow
def test_stopping_real_training_on_two_hosts_leaves_a_model_and_a_stopped_run(digits):
    run = launcher.run(launcher.plan(classifier(
        digits, distribution="torchrun", compute={"instance_count": 2}, hyperparameters={"max_steps": None, "epochs": 10_000, "log_every": 5},
    )))  # fmt: skip
    wait_until(lambda: any(True for _ in run.progress()), 90, "a first metric line")
    run.stop()
    assert run.wait(60) == "Stopped"
    assert set(run.outcome()["toolkit_exit_codes"].values()) == {0}
    result = run.result()
    assert result["stopped"] and 0 < result["steps"] < 10_000
    assert run.folder.model.is_file()
    assert_nothing_left(run)


def test_one_step_is_adamw_with_warm_up_clipping_and_decay(digits, teacher_run):
    """Three steps by hand, on the batches that the loop draws, give the run's weights."""
    from training.data.views import open_data
    from training.settings.scripts import ClassifierSettings

    settings = ClassifierSettings(model="vit_tiny_patch16_224", model_options=TINY, **{**FAST, **SCHEDULE})
    torch.manual_seed(4)
    data = open_data(digits / "train", digits / "validation", settings, 1)
    loaders = open_loaders(data, settings, ALONE, batch_size_per_device=settings.global_batch_size)
    model = timm_models.build(settings.model, TINY, 10)
    first, second = ({}, {})
    factors = (1 / 2, 1.0, 0.5)  # one step of warm-up, then a cosine over two
    for step, batch in zip(range(1, 4), loaders.train, strict=False):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.images), batch.labels).backward()
        named = dict(model.model.named_parameters())
        norm = torch.sqrt(sum((parameter.grad**2).sum() for parameter in named.values()))
        rate = 0.02 * factors[step - 1]
        with torch.no_grad():
            for name, parameter in named.items():
                gradient = parameter.grad * min(1.0, 0.5 / (norm.item() + 1e-6))
                decayed = parameter.ndim > 1 and name not in ("pos_embed", "cls_token")
                parameter.mul_(1 - rate * (0.3 if decayed else 0))
                first[name] = 0.9 * first.get(name, 0) + 0.1 * gradient
                second[name] = 0.999 * second.get(name, 0) + 0.001 * gradient**2
                parameter.sub_(
                    rate * (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
                )
    for name, value in weights(teacher_run).items():
        assert torch.allclose(value, model.model.state_dict()[name], atol=2e-4), name
    rates = [metric["learning_rate"] for metric in teacher_run.metrics() if "loss" in metric]
    assert rates == pytest.approx([0.02, 0.01])


@pytest.mark.slow
def test_the_teachers_part_of_the_loss_is_the_one_of_its_temperature(digits):
    """At the first step the student is as it was built, so its loss can be worked out from both models."""
    from training.data.views import open_data
    from training.settings.distillation import DistillationSettings
    from training.tasks.losses import label_cross_entropy, temperature_kl

    source = finished(classifier(digits))
    values = {
        **FAST,
        "max_steps": 1,
        "log_every": 1,
        "temperature": 3,
        "hard_label_weight": 0.25,
        "label_smoothing": 0.1,
    }
    job_values = {"student": "vit_tiny_patch16_224", "student_options": TINY, **values}
    run = finished(
        job(
            digits,
            "train_kd.py",
            job_values,
            inputs={"teacher": {"folder": str(source.folder.host("algo-1") / "model")}},
        )
    )
    settings = DistillationSettings(**job_values)
    torch.manual_seed(0)
    data = open_data(digits / "train", digits / "validation", settings, 1)
    student = timm_models.build(settings.student, TINY, 10)
    frozen = teacher.load(source.folder.host("algo-1") / "model", data.classes, channels=1, image_size=16)
    batch = next(iter(open_loaders(data, settings, ALONE, batch_size_per_device=32).train))
    hard = label_cross_entropy(student(batch.images), batch.labels, smoothing=0.1).item()
    soft = temperature_kl(student(batch.images), frozen(batch.images), 3).item()
    [metric] = [metric for metric in run.metrics() if "loss" in metric]
    assert (metric["label_loss"], metric["teacher_loss"]) == pytest.approx((hard, soft), rel=1e-4)
    assert metric["loss"] == pytest.approx(0.25 * hard + 0.75 * soft, rel=1e-4)
    assert run.result()["images_per_second"] is None, "one step is all warm-up"


LABELS_ALONE = {"student": "vit_tiny_patch16_224", "student_options": TINY, "hard_label_weight": 1}


@pytest.fixture(scope="module")
def in_a_shell(digits, tmp_path_factory) -> Path:
    """What a student's run on labels alone leaves, whose script a plain shell started."""
    folder = tmp_path_factory.mktemp("shell")
    command = [sys.executable, str(ROOT / "entrypoints/train_kd.py")]
    for name, value in {**FAST, **LABELS_ALONE}.items():
        command += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    environ |= {"SM_CHANNEL_TRAIN": str(digits / "train"), "SM_CHANNEL_VALIDATION": str(digits / "validation")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "output"


def test_labels_alone_need_no_teacher(digits, in_a_shell):
    assert launcher.plan(job(digits, "train_kd.py", LABELS_ALONE)).errors == ()
    assert json.loads((in_a_shell / "data/algo-1/result.json").read_text())["teacher"] is None
    metrics = (in_a_shell / "data/algo-1/metrics.jsonl").read_text().splitlines()
    assert metrics and all("teacher_loss" not in json.loads(line) for line in metrics)


def test_a_failing_script_says_what_is_wrong_first(digits):
    expected = "ValueError: 10 training images make no batch of global_batch_size 32: lower it to 10 or less"
    job = classifier(digits, hyperparameters={"images_per_class": 1}, distribution="torchrun")
    run = launcher.run(launcher.plan(job))
    assert run.wait(90) == "Failed"
    assert run.outcome()["failure"].startswith(f"rank 0: {expected}")
    assert len(run.outcome()["failure"]) <= 1024


def test_metric_lines_match_their_numbers(student_run):
    written, read = student_run.metrics(), [metric.values for metric in student_run.progress()]
    assert len(written) == len(read) == 5  # three steps, an evaluation, a checkpoint
    for exact, shown in zip(written, read, strict=True):
        assert shown == pytest.approx({name: exact[name] for name in shown}, rel=1e-3, abs=1e-4)


def test_the_scripts_run_in_a_plain_shell_too(in_a_shell):
    assert (in_a_shell / "model/model.safetensors").is_file() and (in_a_shell / "data/algo-1/result.json").is_file()
    samples = list((in_a_shell / "data/algo-1").glob("profiler-output/system/incremental/*/*.json"))
    assert samples, "the system monitor finds its own package, whoever started the script"


FEW = {"images_per_class": 8, "global_batch_size": 16, "epochs": 2, "max_steps": None, "log_every": 1}
"""Five steps an epoch."""


@pytest.fixture(scope="module")
def taught(digits, tmp_path_factory):
    """A teacher's model as a run leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHER_RUNS", str(tmp_path_factory.mktemp("teachers")))
        run = finished(classifier(digits, hyperparameters={"max_steps": 60, "learning_rate": 0.01}))
        return run.folder.host("algo-1") / "model"


def distilled(digits, teacher_folder, *, hosts: int = 1, **hyperparameters) -> launcher.Run:
    spread = {"distribution": "torchrun", "compute": {"instance_count": hosts}} if hosts > 1 else {}
    inputs = {"teacher": {"folder": str(teacher_folder)}}
    return finished(job(digits, "train_kd.py", {**STUDENT, **FEW, **hyperparameters}, inputs=inputs, **spread))


def curve(run: launcher.Run, name: str = "loss") -> dict[int, float]:
    return {metric["step"]: metric[name] for metric in run.metrics() if name in metric}


@pytest.mark.slow
def test_a_cache_with_a_view_for_each_epoch_trains_what_the_teacher_itself_would(digits, taught):
    values = {"max_shift_pixels": 2, "mixup": 0.8, "cutmix": 1.0}
    online = distilled(digits, taught, **values)
    exact = distilled(digits, taught, **values, teacher_cache={"views": 2, "top_k": None, "precision": "fp32"})
    kept = distilled(digits, taught, **values, teacher_cache={"views": 2, "top_k": None})
    assert curve(exact) == curve(online)
    assert all(torch.equal(value, weights(exact)[name]) for name, value in weights(online).items())
    assert curve(kept) == pytest.approx(curve(online), rel=1e-3)


@pytest.mark.slow
def test_a_kept_view_needs_no_teacher_when_it_is_drawn_again(digits, taught):
    run = distilled(digits, taught, epochs=3, max_shift_pixels=2, teacher_cache={"views": 1, "top_k": 3})
    shares = curve(run, "teacher_share")
    first, later = (sum(shares[step] for step in steps) for steps in (range(2, 6), range(7, 16)))
    assert later / 9 < first / 4 / 2
    folder = run.folder.host("algo-1") / "checkpoints/teacher_cache"
    said = next(line for _, line in run.logs() if line.startswith("label bank"))
    assert f"{(folder / 'view-0001.bin').stat().st_size // 80} bytes each" in said


@pytest.mark.slow
def test_two_hosts_fill_a_cache_and_train_as_one_host_does(digits, taught):
    values = {"teacher_cache": {"views": 1, "top_k": None, "precision": "fp32"}, "max_grad_norm": None}
    one, two = distilled(digits, taught, **values), distilled(digits, taught, hosts=2, **values)
    assert curve(two) == pytest.approx(curve(one), rel=1e-4)
    caches = [
        (two.folder.host(host) / "checkpoints/teacher_cache/view-0001.bin").read_bytes()
        for host in ("algo-1", "algo-2")
    ]
    assert caches[0] == caches[1]


@pytest.mark.slow
def test_every_lever_together_trains_on_two_hosts(digits, taught, tmp_path):
    compression = "bf16" if gloo_adds_bf16(tmp_path) else "none"
    run = distilled(
        digits, taught, hosts=2, precision="bf16", zero=True, ema_decay=0.9, batch_size_per_device=4, static_graph=True,
        gradient_compression=compression, method="dkd", standardize_logits=True, mixup=0.8, random_erasing=0.5, channels_last=True,
    )  # fmt: skip
    assert {"dkd_target", "dkd_nontarget", "label_loss", "teacher_loss"} <= set(run.metrics()[0])
    said = "\n".join(line for _, line in run.logs())
    for words in ("zero saves", "precision bf16 saves", "teacher_precision bf16 saves", "parameters in bf16, frozen"):
        assert words in said
    assert 0 < run.result()["validation_accuracy"] < 1 and "teacher_top1_agreement" in run.result()


@pytest.mark.slow
def test_several_teachers_are_one_that_is_measured_first(digits, taught, tmp_path):
    for name in ("first", "second"):
        shutil.copytree(taught, tmp_path / "both" / name)
    run = distilled(digits, tmp_path / "both", min_teacher_accuracy=0.3, epochs=1)
    assert run.result()["teacher"]["model"].count("vit_tiny_patch16_224") == 2
    alone = distilled(digits, taught, epochs=1)
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5), "the mean of a model with itself is the model"


@pytest.mark.slow
def test_a_teacher_that_knows_too_little_is_refused_before_the_first_step(digits, taught):
    inputs = {"teacher": {"folder": str(taught)}}
    run = launcher.run(
        launcher.plan(job(digits, "train_kd.py", {**STUDENT, **FEW, "min_teacher_accuracy": 1}, inputs=inputs))
    )
    assert run.wait(90) == "Failed"
    assert "min_teacher_accuracy" in run.outcome()["failure"] and curve(run) == {}

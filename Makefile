# make quickstart   set up .venv, then train a teacher and distil it into a student (no AWS, no Docker)
# make test         set up .venv, lint, and run the tests that are not slow (no Docker), two more at a time than there are cores, 6 at most (WORKERS=…)
# make test-slow    set up .venv, then run the slow tests: more whole runs, longer searches, the notebooks, and those that need quiet cores alone (no Docker)
# make lint         ruff, and mypy over launcher/ and entrypoints/
# make audit        known vulnerabilities of the pinned packages; says so where PyPI's data are not at hand (.venv-audit)
# make compat       the entry scripts' and the observer's tests on the oldest packages that they run on (.venv-oldest, Python 3.10 or 3.11), then on .venv's
# make compat-smdebug   smdebug's own readers (.venv-smdebug, Python 3.10 or 3.11) open what our monitor wrote
# make compat-v3    with SageMaker's SDK v3 in place of v2, in .venv-v3: requests, jobs on the emulator and in containers (needs a Docker engine)
# make bench        the benchmarks of start-up and planning
# make bench-kd     the distillation benchmark on Fashion-MNIST
# make bench-kd-vit     a real ViT teaches a light one by logits, features and both, with few labels too, on pictures (about an hour)
# make bench-bank   the label bank: bytes a record, what 8 and 4 bits cost a student over five seeds and a loss of features, what filling costs a step
# make bench-pixels what a segmenter loses in a label bank: bytes a record, the loss and its gradient from kept answers (about 5 minutes)
# make bench-views  several views from one decoding: the input alone, a training loop, accuracy over five seeds (about 25 minutes)
# make bench-students   five students of one pass of the teacher beside five runs of one student and the teacher's pass (at most 15 minutes)
# make bench-training   the engine beside a plain loop, timm's task and torchdistill; its own cost, the cache, scaling, memory
# make bench-scaling    two communicating gloo hosts beside two that do not, by the segmentation job; the scaling model on a local study
# make at-scale     KT's job on up to 1,024 GPUs, on paper: steps, the input's bandwidth, failures, and what each number rests on (a second)
# make bench-input  what an image costs by each way of preprocessing beside torchvision's, SPDL's and DALI's, fidelity, and memory over time
# make bench-insight    what the system monitor and the observer cost, and how fast the files are read
# make bench-planted    a run with a bottleneck of each kind, its diagnosis, and what the fix brought (about 90 minutes)
# make bench-planted-busy    the same runs and their diagnoses, without the fixes, beside a program that computes all the time (about 95 minutes)
# make bench-planted-others    the harsher ones watched by TraceML and gpuprof, and judged by Debugger's rules (about two hours)
# make bench-planted-foreign    the same kinds in scripts that know nothing of the kit: plain PyTorch, Lightning, Trainer, and on a simulated accelerator
# make bench-tune       launcher tune beside an exhaustive grid of what it may change, on slow jobs (about 80 minutes; goes on where it was)
# make mutants      each operator of the diagnosis's rules turned, one at a time: how many do the tests notice (about 5 minutes)
# make bench-remote     a server on one core and a trainer on the other: images/s beside the core's own, the trainer's CPU, a job, two trainers (about 10 minutes)
# make bench-workers    what too many data workers cost, and what fewer bring, on a simulated accelerator; what each kind of them costs the launching thread (about 30 minutes)
# make notebooks    every notebook executed, its outputs and pictures stored where they bear out its text (about 15 minutes)
# make test-notebooks   the notebooks' tests, with nothing else beside them: what KT's journey measures has to be as its text says
# make gpu          every check that needs a GPU, wherever there is one, into docs/results/gpu.md (PART=2: one part of thirteen, 8 minutes at most;
#                   PART=--skip-passed: without the checks that passed before, of this commit)
# make gpu-if-any   the same; where there is no GPU it says so and ends well
# make drill        20 kills of a run at random moments and 4 of one on two hosts, resumed, and 50 of servers; compared with one undisturbed
# make image        the CPU image of SageMaker's local mode (needs a Docker engine; docker/README.md)
# make image-base   its base by debootstrap, where no registry of images can be reached
# make image-training   the image for SageMaker, on one of AWS's Deep Learning Containers
# make test-docker  set up .venv, build the local image where it is not up to date, then run the tests with Docker

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
LAUNCHER := $(VENV)/bin/launcher
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
TESTS = -m pytest -n $(WORKERS) --dist worksteal
PYTEST = $(VENV)/bin/python $(TESTS)
ALONE := $(VENV)/bin/python -m pytest
OLDEST := .venv-oldest
SMDEBUG := .venv-smdebug
SDK_V3 := .venv-v3
OTHERS := .venv-others
AUDIT := .venv-audit
OLDEST_PYTHON ?= $(shell PYENV_VERSION=3.10 python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))

# some shells and images set it: then each of the many processes that tests start would compile this kit's modules anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-device test-slow audit compat compat-smdebug compat-v3 lint at-scale bench bench-kd bench-kd-vit bench-views bench-students bench-bank bench-pixels bench-training bench-scaling bench-input bench-insight bench-planted bench-planted-busy bench-planted-others bench-planted-foreign bench-remote bench-workers bench-tune mutants notebooks test-notebooks gpu gpu-if-any drill image image-base image-training test-docker clean

quickstart: $(INSTALLED)
	$(LAUNCHER) prepare digits data/digits
	$(LAUNCHER) run configs/quickstart_teacher.yaml
	$(LAUNCHER) run configs/quickstart.yaml name=quickstart-alone hyperparameters.hard_label_weight=1
	$(LAUNCHER) run configs/quickstart.yaml
	@echo
	@$(LAUNCHER) compare quickstart-teacher quickstart-alone quickstart
	@echo
	@echo "Next: the same on two hosts    $(LAUNCHER) run configs/quickstart.yaml --hosts 2"
	@echo "      what a run would do      $(LAUNCHER) plan configs/quickstart.yaml hyperparameters.temperature=2"
	@echo "      all runs, and one of them  $(LAUNCHER) runs    $(LAUNCHER) show quickstart"
	@echo "      a real ViT as the teacher, images without labels, many students of one pass    docs/distillation.md"

# two workers more than cores, as these tests also wait; those on the stand-in GPU by file: the ranks and runs that a file's tests share are made once
test: WORKERS := $(shell echo $$(($(WORKERS) + 2)))
test: $(INSTALLED)
	.ci/browser
	$(MAKE) --jobs=2 lint test-device WORKERS=$(WORKERS)
	$(PYTEST) --ignore=tests/device -m "not slow"

test-device: $(INSTALLED)
	$(PYTEST) --dist loadfile tests/device

test-slow: $(INSTALLED)
	.ci/browser
	$(PYTEST) --ignore=tests/device -m "slow and not alone"
	$(ALONE) --ignore=tests/device -m "slow and alone"

audit: $(AUDIT)/.installed
	.ci/audit $(AUDIT)

compat: $(OLDEST)/.installed $(INSTALLED)
	$(OLDEST)/bin/python $(TESTS) tests/entrypoints tests/observer/test_loops.py
	$(PYTEST) tests/entrypoints

compat-smdebug: $(SMDEBUG)/.installed $(INSTALLED)
	$(VENV)/bin/python tests/insight/smdebug_compat.py --python $(SMDEBUG)/bin/python

compat-v3: $(SDK_V3)/.installed image
	LAUNCHER_TEST_SDK_V3=1 $(SDK_V3)/bin/python -m pytest tests/aws/sdk_v3
	LAUNCHER_TEST_DOCKER=1 $(SDK_V3)/bin/python -m pytest tests/local_mode/test_engine.py -k "one_host or two_hosts"

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/mypy

bench: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/startup.py

bench-kd: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/distillation.py

bench-kd-vit: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/vit_distillation.py

bench-views: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/views_per_decode.py

bench-students: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/many_students.py

bench-bank: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/cache_cost.py
	$(VENV)/bin/python tests/benchmarks/label_bank.py
	$(VENV)/bin/python tests/benchmarks/kept_features.py

bench-pixels: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/kept_pixels.py

bench-training: $(INSTALLED)
	for script in training_speed loop_cost scaling memory; do $(VENV)/bin/python tests/benchmarks/$$script.py || exit 1; done

at-scale: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/at_scale.py

bench-scaling: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/scaling.py --job segmentation
	$(LAUNCHER) prepare shapes data/shapes
	$(LAUNCHER) study scaling configs/hyundai_segmentation.yaml --smoke "hyperparameters.image_size=[128, 128]"

bench-input: $(INSTALLED) $(OTHERS)/.installed $(OTHERS)/.ffcv
	export PYTHONPATH=$(CURDIR)/$(OTHERS); for script in preprocessing memory_flat; do $(VENV)/bin/python tests/benchmarks/$$script.py || exit 1; done

bench-insight: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/monitor_cost.py
	for script in observer_cost observer_start; do $(VENV)/bin/python tests/benchmarks/$$script.py || exit 1; done
	$(VENV)/bin/python tests/benchmarks/reading.py --week

bench-planted: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/planted_bottlenecks.py

bench-planted-busy: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/planted_bottlenecks.py --busy 1

bench-planted-others: $(INSTALLED) $(OTHERS)/.installed
	PYTHONPATH=$(CURDIR)/$(OTHERS) $(VENV)/bin/python tests/benchmarks/planted_bottlenecks.py --others --harsher

bench-planted-foreign: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/planted_foreign.py

bench-remote: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/remote.py

bench-workers: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/simulated_workers.py
	$(VENV)/bin/python tests/benchmarks/launch_delay.py

bench-tune: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/tune_grid.py

mutants: $(INSTALLED)
	$(VENV)/bin/python -m tests.insight.mutants

notebooks: $(INSTALLED)
	$(VENV)/bin/python -m tests.notebooks.executing --store

test-notebooks: $(INSTALLED)
	LAUNCHER_TEST_NOTEBOOKS=1 $(VENV)/bin/python -m pytest -n 0 tests/notebooks

# on a bare GPU machine there is neither .venv nor a network
gpu gpu-if-any: GPU_PYTHON = $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))

gpu:
	@$(GPU_PYTHON) -m tests.gpu $(PART)

gpu-if-any:
	@$(GPU_PYTHON) -m tests.gpu --if-any $(PART)

drill: $(INSTALLED)
	$(LAUNCHER) prepare digits data/digits
	$(LAUNCHER) drill configs/quickstart_teacher.yaml hyperparameters.epochs=6 hyperparameters.checkpoint_every=7 --kills 20
	$(LAUNCHER) drill configs/quickstart_teacher.yaml distribution=torchrun hyperparameters.epochs=2 hyperparameters.checkpoint_every=7 --hosts 2 --kills 4
	$(LAUNCHER) prepare photos data/photos
	$(LAUNCHER) drill configs/remote_preprocessing.yaml --smoke --servers --kills 50 hyperparameters.max_steps=300 hyperparameters.epochs=10 hyperparameters.evaluate_every=10 hyperparameters.log_every=1

image: $(INSTALLED)
	docker/build local

image-base:
	docker/build base

image-training: $(INSTALLED)
	docker/build training

test-docker: image
	LAUNCHER_TEST_DOCKER=1 $(PYTEST) tests/docker tests/local_mode

$(INSTALLED): pyproject.toml .ci/constraints.txt .ci/install
	PYTHON=$(PYTHON) .ci/install $(VENV)
	touch $@

$(OLDEST)/.installed: pyproject.toml .ci/constraints-oldest.txt .ci/install
	PYTHON=$(OLDEST_PYTHON) .ci/install $(OLDEST) oldest
	touch $@

$(AUDIT)/.installed: Makefile
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	touch $@

$(SMDEBUG)/.installed: pyproject.toml .ci/constraints-smdebug.txt .ci/install
	PYTHON=$(OLDEST_PYTHON) .ci/install $(SMDEBUG) smdebug
	touch $@

$(SDK_V3)/.installed: pyproject.toml .ci/constraints-v3.txt .ci/install
	PYTHON=$(PYTHON) .ci/install $(SDK_V3) v3
	touch $@

# beside .venv and not in it: what they need is there already, but for small packages
$(OTHERS)/.installed: Makefile
	$(VENV)/bin/pip install --no-deps --target $(OTHERS) --upgrade traceml-ai==0.5.0 gpuprof==0.7.1 msgspec==0.22.0 nvidia-ml-py==13.615.71 spdl-core==0.8.0 spdl-io==0.8.0
	touch $@

# FFCV is built from its source. Without OpenCV's headers the benchmark runs without it and says what it lacks; the next one tries again.
$(OTHERS)/.ffcv: $(OTHERS)/.installed
	-$(VENV)/bin/pip install --no-deps --target $(OTHERS) --upgrade ffcv==1.0.2 numba==0.68.1 llvmlite==0.50.0 assertpy==1.1 fastargs==1.2.0 terminaltables==3.1.10 pandas==3.1.1 pytz==2026.6 && touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(SMDEBUG) $(SDK_V3) $(OTHERS) $(AUDIT) dist

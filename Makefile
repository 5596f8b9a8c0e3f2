# Every target sets up what it needs: `make train` and `make test` work in a fresh clone, with Python 3.11 and make.
PYTHON ?= $(shell for p in python3.11 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ARGS ?=
# workers of pytest: three on two cores, since many tests wait for processes that they have started
JOBS ?= 3
QUICK := $(addprefix tests/,unit optim schedules house/test_doors.py house/test_docstrings.py house/test_imports.py) fds
unexport PYTHONDONTWRITEBYTECODE  # tests are rewritten and compiled once, which takes each worker 5 s
BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv-peers/.ready
DOCS := .venv-docs/.ready
PEERS_TESTED := .venv-peers/.ready-for-tests

.DEFAULT_GOAL := help
.PHONY: help setup train test check every-test unit-tests test-peers test-inductor test-cpus test-browser test-matrix laws sweeps faults resizing mutants fuzz-config lint format bench-plain bench-host bench-compiling bench-launches bench-sharding bench-tensor bench-overlap bench-pipeline bench-storage bench-loading bench-weights bench-offload bench-offload-large bench-kernels bench-imports bench-watching bench-network bench-losses bench-efficiency bench-context bench-analysing bench-dropping bench-sparse bench-bert bench-rows bench-compressing bench-adapters bench-tuning gpu gpu-tests gpu-kernels gpu-step gpu-counters package gallery docs docs-serve docs-look architecture golden clean

help:  ## say what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo '  ARGS="..." is passed on to the program: make train ARGS="--steps 200"'

setup: $(READY)  ## install fds and what its tests need into .venv

train: $(READY)  ## run the main job, examples/train_gpt.py, on every GPU or core
	@$(BIN)/python examples/train_gpt.py --ranks 0 $(ARGS)

test: $(READY)  ## everything that CI runs: every test, and lint beside them
	@$(MAKE) --no-print-directory --jobs 2 lint every-test

check: $(READY)  ## what to run after every change, a minute: lint, types, doors and the unit tests
	@$(MAKE) --no-print-directory --jobs 2 lint unit-tests

every-test: $(READY)
	@$(BIN)/pytest -n $(JOBS) $(ARGS)

unit-tests: $(READY)
	@$(BIN)/pytest -n $(JOBS) $(QUICK) $(ARGS)

test-peers: $(PEERS_TESTED)  ## run the tests that ask DeepSpeed and transformers themselves (needs .venv-peers, large)
	@.venv-peers/bin/python -m pytest -m peers tests $(ARGS)

test-inductor: $(READY)  ## run the tests that compile by torch's inductor (needs a C++ compiler; minutes)
	@$(BIN)/pytest -m inductor tests/sharding tests/transforms $(ARGS)

test-cpus: $(READY)  ## run the tests that depend on the CPU's instructions as on CPUs with others (an hour on two cores)
	@$(BIN)/python -m tests.cpus $(ARGS)

test-browser: $(READY)  ## run the tests that look at the page of fds report in a headless Chromium (needs chromium)
	@$(BIN)/pytest -m browser tests/reporting $(ARGS)

test-matrix: $(READY)  ## run a fast part of the tests on each version of torch and Python (makes .venv-matrix, large)
	@$(BIN)/python -m tests.package.matrix $(ARGS)

laws: $(READY)  ## run the laws on many more examples than `make test`, new ones every time
	@FDS_SWEEPS=whole FDS_HYPOTHESIS_PROFILE=full $(BIN)/pytest -n $(JOBS) tests/laws $(ARGS)

sweeps: $(READY)  ## run all cases, examples and launches of which `make test` has some (half an hour on two cores)
	@FDS_SWEEPS=whole $(BIN)/pytest -n $(JOBS) -m "(sweep or whole or hypothesis) and not (peers or inductor or gpu or browser)" tests $(ARGS)

faults: $(READY)  ## kill saves and ranks, fail every write, tamper with files: some ten minutes, new instants every time
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.storage.campaign $(ARGS)

resizing: $(READY)  ## lose and add ranks of running jobs at random, 60 times: their losses stay (some twenty minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.elastic.campaign $(ARGS)

mutants: $(READY)  ## break fds in some 200 ways, one at a time: a test must notice each (an hour; ARGS="fds/storage" for a part)
	@$(BIN)/python -m tests.mutants --jobs $(JOBS) $(ARGS)

fuzz-config: $(PEERS)  ## train by 500 random configurations beside DeepSpeed (needs .venv-peers, large; some twenty minutes)
	@.venv-peers/bin/python -m tests.fuzzing $(ARGS)

lint: $(READY)  ## ruff, its formatter, and pyright
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet || { echo 'fds: make format lays it out'; exit 1; }
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(READY)  ## lay out the code as ruff does
	@$(BIN)/ruff check --fix --exit-zero --quiet
	@$(BIN)/ruff format --quiet

bench-plain: $(READY)  ## time the plain step beside a hand-written loop
	@$(BIN)/python benchmarks/plain.py $(ARGS)

bench-host: $(PEERS)  ## time what a step takes of the host, at up to 5,000 parameters (needs .venv-peers, large)
	@.venv-peers/bin/python benchmarks/host.py $(ARGS)

bench-compiling: $(READY)  ## time a step whose loss, or all of which, is compiled (needs a C++ compiler)
	@$(BIN)/python benchmarks/compiling.py $(ARGS)

bench-launches: $(READY)  ## time what kernels and their launches take of the host; no GPU is needed
	@$(BIN)/python benchmarks/launches.py $(ARGS)

bench-tensor: $(READY)  ## time tensor parallelism beside DTensor and DDP
	@$(BIN)/python benchmarks/tensor.py $(ARGS)

bench-overlap: $(READY)  ## time products beside the messages of a tensor axis, also over a cable
	@$(BIN)/python benchmarks/overlap.py $(ARGS)

bench-sharding: $(PEERS)  ## time sharded training beside DDP, FSDP2 and DeepSpeed (needs .venv-peers, large)
	@.venv-peers/bin/python benchmarks/sharding.py $(ARGS)

bench-pipeline: $(PEERS)  ## time pipelines beside DeepSpeed's and torch's (needs .venv-peers, large)
	@.venv-peers/bin/python benchmarks/pipeline.py $(ARGS)

bench-storage: $(READY)  ## time saving and loading beside torch's, and raw writes
	@$(BIN)/python benchmarks/storage.py $(ARGS)

bench-loading: $(PEERS)  ## read a model of transformers into slices, beside a raw read (needs .venv-peers, large)
	@.venv-peers/bin/python benchmarks/loading.py $(ARGS)

bench-weights: $(READY)  ## stream whole weights, beside plain collectives of the same bytes
	@$(BIN)/python benchmarks/weights.py $(ARGS)

bench-offload: $(PEERS)  ## time and weigh state on the host and on a disk, beside DeepSpeed's (needs .venv-peers, large)
	@.venv-peers/bin/python benchmarks/offload.py $(ARGS)

bench-offload-large: $(READY)  ## train 3 billion parameters whose state is on the disk (needs 50 GB of it)
	@$(BIN)/python benchmarks/offload_large.py $(ARGS)

bench-kernels: $(READY)  ## time the kernels on a GPU beside torch's; without one, show what they take of it
	@$(BIN)/python benchmarks/kernels.py $(ARGS)

bench-imports: $(READY)  ## time import fds beside import torch
	@$(BIN)/python benchmarks/imports.py $(ARGS)

bench-watching: $(READY)  ## time a step with monitors, and one that is timed, beside the step without
	@$(BIN)/python benchmarks/watching.py $(ARGS)

bench-network: $(PEERS)  ## time messages in fewer bytes over a cable (root, iproute2; needs .venv-peers, large)
	@.venv-peers/bin/python benchmarks/network.py $(ARGS)

bench-losses: $(READY)  ## train the main job by messages in fewer bytes: what it learns beside lossless ones
	@$(BIN)/python benchmarks/losses.py $(ARGS)

bench-efficiency: $(READY)  ## train the main job with curricula and fewer tokens or layers: what it learns of as many tokens
	@$(BIN)/python benchmarks/efficiency.py $(ARGS)

bench-compressing: $(READY)  ## compress the main job: held-out loss, bytes, speed of the baked model; time of a rounded step
	@$(BIN)/python benchmarks/compressing.py $(ARGS)

bench-adapters: $(READY)  ## time a step with adapters, in layers, views and on weights of 4 bits, beside a full one
	@$(BIN)/python benchmarks/adapters.py $(ARGS)

bench-context: $(READY)  ## time and weigh Ulysses and ring attention at 8k tokens beside one rank
	@$(BIN)/python benchmarks/context.py $(ARGS)

bench-dropping: $(READY)  ## time a step whose layers compute some of the tokens, or are skipped
	@$(BIN)/python benchmarks/dropping.py $(ARGS)

bench-sparse: $(READY)  ## time and weigh sparse attention on a CPU beside dense attention, 1k to 16k tokens
	@$(BIN)/python benchmarks/sparse.py $(ARGS)

bench-tuning: $(READY)  ## predict the compositions of ten problems, try all, and see what the tuner would choose
	@$(BIN)/python benchmarks/tuning.py $(ARGS)

bench-bert: $(PEERS)  ## train a pretrained BERT on long rows, sparse and dense (needs .venv-peers and the weights, see its head)
	@.venv-peers/bin/python benchmarks/bert.py $(ARGS)

bench-rows: $(PEERS)  ## train on one row of 131,072 tokens over two ranks, in tiles (needs .venv-peers, large)
	@.venv-peers/bin/python benchmarks/rows.py $(ARGS)

bench-analysing: $(PEERS)  ## time the analysis of a file of tokens beside DeepSpeed's (needs .venv-peers, large)
	@.venv-peers/bin/python benchmarks/analysing.py $(ARGS)

# On a GPU: no environment is made and nothing is installed, for the machine may have no network (docs/gpu.md). GPU_PYTHON
# has a torch that sees the GPU, GPU_SITE is a folder with the wheels that it lacks.
GPU_PYTHON ?= python3
GPU_SITE ?=
GPU = @PYTHONPATH=$(CURDIR)$(if $(GPU_SITE),:$(GPU_SITE))$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) -m benchmarks.gpu

gpu:  ## prove and measure all of it on a GPU, in calls of nine minutes: call it until it has nothing left to do
	$(GPU) $(ARGS)

gpu-tests:  ## the tests on CUDA, those of kernels first
	$(GPU) kernel-tests tests $(ARGS)

gpu-kernels:  ## kernels beside torch, torch.compile and what else is installed
	$(GPU) kernels $(ARGS)

gpu-step:  ## whole steps of GPT-2 124M beside torch's
	$(GPU) step $(ARGS)

gpu-counters:  ## compute-sanitizer on tiny shapes of every kernel
	$(GPU) counters $(ARGS)

package: $(READY)  ## build the source distribution and the wheel into dist, and try the wheel in an empty environment
	@rm -rf build dist
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m tests.package.fresh dist/*.whl $(ARGS)

gallery: $(READY)  ## draw the schedules of docs/pipelines.md again, into docs/images, and the layouts of docs/long-rows.md
	@$(BIN)/python docs/draw_schedules.py $(ARGS)
	@$(BIN)/python docs/draw_layouts.py

architecture: $(READY)  ## draw docs/architecture.svg again, and write the lines of docs/design/walk.md
	@$(BIN)/python docs/draw_architecture.py
	@$(BIN)/python docs/number_walk.py

docs: $(DOCS)  ## build the documentation's site into site/, without a network; a dead link fails
	@$(MKDOCS) build --strict $(ARGS)
	@echo 'fds: site/index.html; searching needs a server, as make docs-serve is one'

docs-serve: $(DOCS)  ## show the documentation's site at http://127.0.0.1:8000, built again at every change
	@$(MKDOCS) serve $(ARGS)

docs-look: docs  ## take pictures of the site in a browser, into .look/, and check it there (needs chromium)
	@.venv-docs/bin/python docs/generate/look.py $(ARGS)

golden: $(PEERS)  ## record again what DeepSpeed does, into tests/golden (needs .venv-peers, large)
	@DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/generate.py $(ARGS)

clean:  ## remove the environments and every cache
	@rm -rf .venv .venv-peers .venv-matrix build dist .venv-docs site .look .pytest_cache .ruff_cache fds.egg-info
	@find fds tests examples benchmarks docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# torch comes first and pinned: a bare `torch` may be another release, and the build of fds needs torch's setuptools.
# -qq, because pip warns about every index of the machine that lacks a package.
define install
	@test -n "$(PYTHON)" || { echo "fds: Python 3.11 or later is needed; say which with PYTHON=..."; exit 1; }
	@$(@D)/bin/python -c "" 2>/dev/null \
	    || { echo "fds: making $(@D) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(@D); }
	@echo "fds: installing torch into $(@D) (a minute or two the first time)"
	@$(@D)/bin/python -m pip install -qq -c constraints.txt torch setuptools
	@echo "fds: installing fds[$(1)] into $(@D)"
	@$(@D)/bin/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[$(1)]'
	@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call install,dev$(comma)plot)

$(PEERS): pyproject.toml constraints.txt
	$(call install,peers)

$(DOCS): pyproject.toml constraints.txt  # the extra alone, without torch: the sources are read, not imported
	@$(PYTHON) -m venv --clear .venv-docs
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    | .venv-docs/bin/python -m pip install -qq -c constraints.txt -r /dev/stdin
	@touch $@

$(PEERS_TESTED): $(PEERS)  # with what the modules of all tests import, for pytest reads them all
	$(call install,dev$(comma)plot$(comma)peers)

MKDOCS := NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1 .venv-docs/bin/mkdocs
comma := ,

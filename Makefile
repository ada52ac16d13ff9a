# Everything a contributor runs. Each environment is made once; a stamp inside it remembers what was installed.
PYTHON ?= python3
VENV := .venv
PEER := .venv-peer
TRACKERS := .venv-trackers
QUANTIZATION := .venv-quantization
FP8 := .venv-fp8
XLA := .venv-xla
CLIENTS := .venv-clients
EDITORS := .venv-editors
SITE := .venv-site
DEEPSPEED := .venv-deepspeed
MEGATRON := .venv-megatron
RAY := .venv-ray
TORCH_OLDEST := .venv-torch-2.6
TORCH_MIDDLE := .venv-torch-2.9
BIN := $(VENV)/bin
# Hundreds of processes import the package: each would compile it again.
unexport PYTHONDONTWRITEBYTECODE
WHEELS := dist
# Modules are compiled when they are first imported: of the large libraries, only a few ever are.
PIP := -m pip --disable-pip-version-check install --quiet --no-compile
# Half of the time a test waits, mostly for processes to start: so two workers. All of a file is run by one of them.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=5

# Debian keeps the pip that `venv` copies in a package of its own; without it, the system's pip installs one.
make_venv = $(PYTHON) -m venv $(1) || \
	{ $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; }

# An environment that adds to the one of the tests: torch and the rest are found there, unless it has its own.
layer = $(PYTHON) -m venv --without-pip $(1) && \
	echo "$(abspath $(VENV))/lib/$$(ls $(VENV)/lib)/site-packages" > $(1)/lib/$$(ls $(1)/lib)/site-packages/tests.pth

# The released package in a folder of an environment that has this one: first on the path, it takes this one's place.
put_released = $(1)/bin/python $(PIP) --no-deps --upgrade --target $(1)/released \
	$$(grep ^accelerate benchmarks/peer-requirements.txt)

.PHONY: help large-environments quickstart test clusters trackers peer-checkpoints peer-models peer-names peer-behaviour quantization fp8 xla clients deepspeed megatron ray torch-oldest torch-middle peer-launch soak chaos \
	editors wheel wheel-test docs docs-serve site-test plots screenshot \
	lint format file-map bench bench-deepspeed bench-scale
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train a small model on two processes"
	@echo "make test         lint, then all tests"
	@echo "make clusters     Slurm, two machines in network namespaces, job files, preemption"
	@echo "make trackers     the trackers, against their real libraries"
	@echo "make peer-checkpoints  this package and the released one load each other's checkpoints"
	@echo "make peer-launch  this package and the released one tell launched processes the same"
	@echo "make peer-models  device maps and sizes as in the released package"
	@echo "make peer-names   every name of the released package's modules resolves here"
	@echo "make peer-behaviour  small things that scripts rely on, and classes of errors, as in the released package"
	@echo "make quantization weights in 8 and 4 bits, with the real bitsandbytes"
	@echo "make fp8          training in fp8 with the real torchao, emulated on CPU"
	@echo "make xla          training on an XLA device with the real torch_xla, compiled for the CPU"
	@echo "make clients      transformers, peft, diffusers and trl as released, on this package"
	@echo "make deepspeed    ZeRO with the real DeepSpeed, on CPU"
	@echo "make megatron     Megatron-LM with the real megatron-core, on CPU with stand-ins for CUDA"
	@echo "make ray          a training in the workers of the real Ray"
	@echo "make torch-oldest the tests on the oldest release of torch that is supported (QUICK=1: most of them)"
	@echo "make torch-middle the tests on a release of torch between the oldest and the current one"
	@echo "make editors      what jedi, mypy and basedpyright know of every public name"
	@echo "make wheel        a wheel of this package, in dist/"
	@echo "make wheel-test   the wheel, installed into an environment that has nothing else"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make docs-serve   the same, on this machine alone, rebuilt when a page changes"
	@echo "make plots        draw the plots of docs/performance.md again, after a benchmark was run"
	@echo "make screenshot   take the picture of the site that README shows again"
	@echo "make site-test    the site, in a headless Chromium"
	@echo "make soak         kill saves at thousands of moments"
	@echo "make chaos        a training on two machines takes 40 faults in a row (FAULTS=12 takes fewer, SEED=7 others)"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff rewrite the code"
	@echo "make file-map     list all files in docs/architecture.md, after one was added or renamed"
	@echo "make bench        this package, the released one and plain PyTorch side by side"
	@echo "make bench-deepspeed  a step of ZeRO beside the same with DeepSpeed by hand"
	@echo "make bench-scale  count what up to 4,096 ranks tell each other, and draw docs/scaling.md again"

$(BIN)/python:
	$(call make_venv,$(VENV))

$(VENV)/.ready-examples: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing accelerate and what the examples need into $(VENV)"
	$(BIN)/python $(PIP) -c constraints.txt -e '.[examples]'
	@touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing accelerate and what tests and lint need into $(VENV)"
	$(BIN)/python $(PIP) -c constraints.txt -e '.[test,dev]'
	@touch $@ $(VENV)/.ready-examples

$(PEER)/.ready: benchmarks/peer-requirements.txt $(VENV)/.ready-test
	@echo "installing the released package into $(PEER)"
	$(call layer,$(PEER))
	$(PEER)/bin/python $(PIP) -c constraints.txt -r benchmarks/peer-requirements.txt
	@touch $@

$(TRACKERS)/.ready: tests/trackers/requirements.txt benchmarks/peer-requirements.txt $(VENV)/.ready-test
	@echo "installing the tracking libraries into $(TRACKERS)"
	$(call layer,$(TRACKERS))
	$(TRACKERS)/bin/python $(PIP) -c constraints.txt -r tests/trackers/requirements.txt -e '.[trackers]'
	$(call put_released,$(TRACKERS))
	@touch $@

$(QUANTIZATION)/.ready: tests/quantization/requirements.txt $(VENV)/.ready-test
	@echo "installing bitsandbytes into $(QUANTIZATION)"
	$(call layer,$(QUANTIZATION))
	$(QUANTIZATION)/bin/python $(PIP) -c constraints.txt -r tests/quantization/requirements.txt -e .
	@touch $@

$(FP8)/.ready: tests/fp8/requirements.txt $(VENV)/.ready-test
	@echo "installing torchao into $(FP8)"
	$(call layer,$(FP8))
	$(FP8)/bin/python $(PIP) --no-deps -r tests/fp8/requirements.txt -e .
	@touch $@

$(CLIENTS)/.ready: tests/clients/requirements.txt benchmarks/peer-requirements.txt $(VENV)/.ready-test
	@echo "installing the libraries built on accelerate into $(CLIENTS)"
	$(call layer,$(CLIENTS))
	$(CLIENTS)/bin/python $(PIP) -c constraints.txt -r tests/clients/requirements.txt -e .
	$(call put_released,$(CLIENTS))
	@touch $@

$(EDITORS)/.ready: tests/editors/requirements.txt
	@echo "installing basedpyright into $(EDITORS)"
	test -x $(EDITORS)/bin/python -a -x $(EDITORS)/bin/pip || $(call make_venv,$(EDITORS))
	$(EDITORS)/bin/python $(PIP) -c constraints.txt -r tests/editors/requirements.txt
	@touch $@

$(SITE)/.ready: tests/site/requirements.txt
	@echo "installing what builds and tries the site into $(SITE)"
	test -x $(SITE)/bin/python -a -x $(SITE)/bin/pip || $(call make_venv,$(SITE))
	$(SITE)/bin/python $(PIP) -c constraints.txt -r tests/site/requirements.txt
	@touch $@

# DeepSpeed's own build would fetch another torch, and it compiles what it needs at its first use: both are done here.
# trl, which trains with it too, is found in the environment of the clients.
$(DEEPSPEED)/.ready: tests/deepspeed/requirements.txt tests/deepspeed/build_ops.py benchmarks/peer-requirements.txt $(CLIENTS)/.ready
	@echo "installing DeepSpeed into $(DEEPSPEED)"
	$(call layer,$(DEEPSPEED))
	echo "$(abspath $(CLIENTS))/lib/$$(ls $(CLIENTS)/lib)/site-packages" > $(DEEPSPEED)/lib/$$(ls $(DEEPSPEED)/lib)/site-packages/clients.pth
	$(DEEPSPEED)/bin/python $(PIP) -c constraints.txt wheel setuptools torch -e .
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(DEEPSPEED)/bin/python $(PIP) --no-build-isolation -c constraints.txt -r tests/deepspeed/requirements.txt
	$(call put_released,$(DEEPSPEED))
	DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(abspath $(DEEPSPEED))/torch_extensions PATH=$(abspath $(DEEPSPEED))/bin:$$PATH \
		$(DEEPSPEED)/bin/python tests/deepspeed/build_ops.py
	@touch $@

$(MEGATRON)/.ready: tests/megatron/requirements.txt $(VENV)/.ready-test
	@echo "installing megatron-core into $(MEGATRON)"
	$(call layer,$(MEGATRON))
	$(MEGATRON)/bin/python $(PIP) --no-deps -r tests/megatron/requirements.txt -e .
	@touch $@

$(RAY)/.ready: tests/ray/requirements.txt $(VENV)/.ready-test
	@echo "installing Ray into $(RAY)"
	$(call layer,$(RAY))
	$(RAY)/bin/python $(PIP) -c constraints.txt -r tests/ray/requirements.txt -e .
	@touch $@

# Older releases of torch come as CUDA builds: without what they depend on, and with stand-ins for the CUDA libraries.
.venv-torch-%/.ready: tests/torch_versions/%.txt \
		tests/torch_versions/without_cuda.py $(VENV)/.ready-test
	@echo "installing torch $* into $(@D)"
	$(call layer,$(@D))
	$(@D)/bin/python $(PIP) --no-deps -r tests/torch_versions/$*.txt -e .
	$(@D)/bin/python tests/torch_versions/without_cuda.py
	@touch $@

# torch_xla is made for one release of torch. That is found before the one of the tests: paths are added by file name.
$(XLA)/.ready: tests/xla/requirements.txt $(TORCH_MIDDLE)/.ready
	@echo "installing torch_xla into $(XLA)"
	$(call layer,$(XLA))
	echo "$(abspath $(TORCH_MIDDLE))/lib/$$(ls $(TORCH_MIDDLE)/lib)/site-packages" > $(XLA)/lib/$$(ls $(XLA)/lib)/site-packages/middle.pth
	$(XLA)/bin/python $(PIP) --no-deps -r tests/xla/requirements.txt -e .
	@touch $@

large-environments: $(CLIENTS)/.ready $(DEEPSPEED)/.ready $(MEGATRON)/.ready $(RAY)/.ready $(TORCH_OLDEST)/.ready $(TORCH_MIDDLE)/.ready $(XLA)/.ready

# On CPU even where there is a GPU: two processes cannot share one.
quickstart: $(VENV)/.ready-examples
	$(BIN)/accelerate launch --cpu --num_processes 2 --main_process_port 0 examples/quickstart.py

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The list of files in docs/architecture.md, from their docstrings.
file-map: $(VENV)/.ready-test
	$(BIN)/python -m tests.docs.file_map

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ARGS goes to pytest: make test ARGS="tests/unit -k sampler"
test: lint
	$(BIN)/python $(PYTEST) $(ARGS)

# Slurm with two nodes on this machine, two machines in network namespaces, job files, preemption. Most of it needs root.
clusters: $(VENV)/.ready-test
	$(BIN)/python $(PYTEST) tests/clusters $(ARGS)

# These libraries are heavy, so they have an environment of their own. One that is missing there is a failure.
trackers: $(TRACKERS)/.ready
	REQUIRE_TRACKERS=1 $(TRACKERS)/bin/python -m pytest -n 2 tests/trackers $(ARGS)

peer-checkpoints: $(VENV)/.ready-test $(PEER)/.ready
	$(BIN)/python tests/peer/checkpoints.py $(PEER)/bin/python

peer-launch: $(VENV)/.ready-test $(PEER)/.ready
	$(BIN)/python tests/peer/launch_env.py $(PEER)/bin/python

peer-models: $(VENV)/.ready-test $(PEER)/.ready
	$(BIN)/python tests/peer/device_maps.py $(PEER)/bin/python

peer-names: $(VENV)/.ready-test $(PEER)/.ready
	$(BIN)/python tests/peer/names.py $(PEER)/bin/python

peer-behaviour: $(VENV)/.ready-test $(PEER)/.ready
	$(BIN)/python tests/peer/behaviour.py $(PEER)/bin/python
	$(BIN)/python -m tests.peer.migration $(PEER)/bin/python

quantization: $(QUANTIZATION)/.ready
	REQUIRE_QUANTIZATION=1 $(QUANTIZATION)/bin/python -m pytest tests/quantization $(ARGS)

fp8: $(FP8)/.ready
	REQUIRE_FP8=1 $(FP8)/bin/python -m pytest tests/fp8 $(ARGS)

xla: $(XLA)/.ready
	$(XLA)/bin/python -m pytest -n 2 tests/xla $(ARGS)

clients: $(CLIENTS)/.ready
	$(CLIENTS)/bin/python $(PYTEST) tests/clients $(ARGS)

deepspeed: $(DEEPSPEED)/.ready
	$(DEEPSPEED)/bin/python $(PYTEST) tests/deepspeed $(ARGS)

megatron: $(MEGATRON)/.ready
	$(MEGATRON)/bin/python $(PYTEST) tests/megatron $(ARGS)

ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest tests/ray $(ARGS)

# Without the documents, which show what the current release of torch does, and without what is the same on all of them:
# commands, settings, plans of a launch, trackers, notebooks.
SAME_ON_ALL := $(addprefix tests/unit/,commands config environments launch runs tracking) \
	$(addprefix tests/world/,test_notebook.py test_local_runs.py test_test_utils_scripts.py \
	test_checkpoint_crash.py test_checkpoint_disk.py test_accelerate_test.py)
ON_OLDER = tests/world tests/contract tests/unit $(if $(QUICK),,tests/clusters/test_preemption.py) $(addprefix --ignore=,$(SAME_ON_ALL) $(if $(QUICK),$(SLOW)))
# QUICK=1 leaves out what starts, watches and ends processes, and what counts samples and losses. What is left: unit tests,
# the contract, collectives, engines and their checkpoints.
SLOW := $(addprefix tests/world/,test_launch.py test_launchers_direct.py test_hang.py \
	test_out_of_memory.py test_scaling.py test_quickstart.py test_checkpoint_draws.py test_checkpoint_alone.py \
	test_dispatcher.py test_gather_for_metrics.py test_num_items.py test_uneven.py test_nonfinite.py test_debug_mode.py \
	test_local_sgd.py test_indexed_shuffle.py test_state.py)

torch-oldest: $(TORCH_OLDEST)/.ready
	$(TORCH_OLDEST)/bin/python $(PYTEST) $(or $(ARGS),$(ON_OLDER))

torch-middle: $(TORCH_MIDDLE)/.ready
	$(TORCH_MIDDLE)/bin/python $(PYTEST) $(or $(ARGS),$(ON_OLDER))

# The packages that a checker sees are those of the tests; the environment of its own has the checker alone.
editors: $(VENV)/.ready-test $(EDITORS)/.ready
	BASEDPYRIGHT=$(EDITORS)/bin/basedpyright $(BIN)/python -m pytest tests/editors $(ARGS)

# What an earlier build left would be packed again.
wheel: | $(BIN)/python
	rm -rf build $(WHEELS)/accelerate-*.whl
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir $(WHEELS) .

wheel-test: $(VENV)/.ready-test
	$(BIN)/python -m pytest tests/install $(ARGS)

docs: $(SITE)/.ready
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict

docs-serve: $(SITE)/.ready
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs serve --dev-addr 127.0.0.1:8000

plots:
	$(PYTHON) -m website.plots

screenshot: docs
	$(SITE)/bin/python -m website.screenshot

# The environment of the site has no torch: a test that trains starts the Python of the other tests.
site-test: $(VENV)/.ready-test docs
	TRAINING_PYTHON=$(abspath $(BIN))/python PYTHONPATH=src $(SITE)/bin/python -m pytest --confcutdir tests/site tests/site $(ARGS)

# The tests of crashes, with SOAK times as many moments.
soak: $(VENV)/.ready-test
	SOAK=20 $(BIN)/python -m pytest tests/world/test_checkpoint_crash.py --timeout 3600 $(ARGS)

# The same seed draws the same faults, though not at the same moments. Needs root: the machines are network namespaces.
FAULTS := 40
SEED := 1
chaos: $(VENV)/.ready-test
	$(BIN)/python -m pytest tests/chaos
	$(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED)

bench: $(VENV)/.ready-examples $(PEER)/.ready
	$(BIN)/python benchmarks/run.py $(ARGS)
	$(BIN)/python benchmarks/checkpoint.py --peer $(PEER)/bin/python
	$(BIN)/python benchmarks/many_tensors.py --peer $(PEER)/bin/python
	$(BIN)/python benchmarks/shuffling.py
	$(BIN)/python benchmarks/big_models.py --peer $(PEER)/bin/python
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/small_gather.py
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/watch.py
	for n in 2 4; do OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node $$n benchmarks/sharding.py; done

# On CPU, where the released package refuses DeepSpeed; ARGS="--device cuda --peer PYTHON" compares all three on a GPU.
bench-deepspeed: $(DEEPSPEED)/.ready
	TORCH_EXTENSIONS_DIR=$(abspath $(DEEPSPEED))/torch_extensions PATH=$(abspath $(DEEPSPEED))/bin:$$PATH \
		$(DEEPSPEED)/bin/python benchmarks/zero.py $(ARGS)

bench-scale: $(VENV)/.ready-test
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scaling.py --json benchmarks/results/scaling.json
	$(BIN)/python -m website.scaling
	$(BIN)/python -m website.plots

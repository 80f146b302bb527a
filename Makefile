# Every target works on a fresh clone: it makes .venv, installs what it needs from the package index, and runs.
# Nothing is installed twice: the stamps inside .venv remember. `make clean` forgets.

PYTHON ?= python3
# Exact versions of all that the environment of the tests holds; `make relock` writes them anew.
LOCK   := requirements/locked.txt
# What to install where torch is missing; another version takes the place of the locked one, a CPU build too:
#   make demo TORCH="torch==2.12.1"
TORCH  ?= $(shell grep '^torch==' $(LOCK))

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --constraint $(VENV)/constraints.txt
# Of what pip says, what it fetches (with sizes) and installs; pip's exit code counts.
SHELL  := bash
.SHELLFLAGS := -o pipefail -c
SHOWN  := | awk '/^ *(Downloading|Building)/ { print; fflush() } /^Installing/ { print "installing packages:", NF - 3; fflush() }'
SHAPES := examples/shapes
DEMO   ?= $(SHAPES)/llama-3.1-8b

# Two BLAS threads on a two-core machine make small kernels slower, not faster.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1
# Else each process that a test starts compiles all of autoplan anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests run in so many processes, file by file, in the order of tests/conftest.py: SPREAD= runs them in one. Three keep
# two cores busy: some tests wait.
SPREAD ?= -n 3 --dist loadfile --no-loadscope-reorder

# Libraries that take our plans. Automodel comes without what it needs itself: only its way of reading plans is run.
HOSTS  ?= nemo-automodel lightning-fabric lightning-utilities bitsandbytes torchao compressed-tensors loguru \
          trl datasets multiprocess dill xxhash pyarrow pandas python-dateutil six
# What DeepSpeed imports to parse what we export for it. It is built from source, and nothing of it is compiled.
DEEPSPEED_NEEDS ?= hjson msgpack ninja psutil py-cpuinfo pydantic einops wheel setuptools

# Code bases whose models are planned without help, and what they import. Each comes without what it needs itself: torch
# stays as it is.
WILD   ?= $(shell sed 's/\#.*//' tests/outside/wild/packages.txt)

.PHONY: help demo test test-long test-all test-hosts test-rest test-newest test-oldest test-wild test-theirs test-redteam lint format types docs fuzz bench bench-gpu wheel relock clean

help:  ## list the targets
	@grep -E '^[a-z-]+: .*## ' Makefile | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/base: pyproject.toml $(LOCK)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@{ grep -v '^torch==' $(LOCK); echo "$(TORCH)"; } > $(VENV)/constraints.txt
	@echo "installing $(TORCH)"
	@$(PIP) "$(TORCH)" $(SHOWN)
	@echo "installing autoplan, with versions out of the $$(grep -c == $(LOCK)) of $(LOCK)"
	@$(PIP) hatchling $(SHOWN) && $(PIP) --no-build-isolation --editable . $(SHOWN)
	@touch $@

$(VENV)/dev: $(VENV)/base
	@echo "installing the test tools"
	@$(PIP) --no-build-isolation --editable '.[dev]' $(SHOWN)
	@touch $@

$(VENV)/hosts: $(VENV)/dev
	@echo "installing peft, accelerate and $(HOSTS)"
	@$(PIP) --no-build-isolation --editable '.[peft]' accelerate $(SHOWN) || echo "NOT TRIED: peft and accelerate could not be installed, their tests are skipped"
	@$(PIP) --no-deps $(HOSTS) $(SHOWN) || echo "NOT TRIED: $(HOSTS) could not be installed, their tests are skipped"
	@$(PIP) $(DEEPSPEED_NEEDS) $(SHOWN) && DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation deepspeed $(SHOWN) || \
		echo "NOT TRIED: deepspeed could not be installed, its test is skipped"
	@touch $@

# What torch pins itself (nvidia's packages, triton) is left out, and so is the local part of a version (+cpu).
relock:  ## install the newest versions that pyproject.toml allows, and commit them as requirements/locked.txt
	rm -rf build/relock && mkdir -p build
	printf '# Written by `make relock`: versions under which everything is tested.\n%s\n' "$(TORCH)" > build/newest.txt
	$(MAKE) build/relock/hosts VENV=build/relock LOCK=build/newest.txt TORCH="$(TORCH)"
	{ head -1 build/newest.txt; build/relock/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' | \
		grep -Ev '^(nvidia|cuda|triton)'; } > $(LOCK)
	git commit --quiet --message "Lock: versions of $$(date +%Y-%m-%d)" -- $(LOCK) || echo "nothing moved"

demo: $(VENV)/base  ## plan Llama-3.1-8B's shape at tp 8, then prove it on 2 simulated ranks
	$(BIN)/autoplan plan $(DEMO) --tp 8
	$(BIN)/autoplan verify $(DEMO) --tp 2

test: $(VENV)/dev  ## run the tests, but for long and slow ones
	$(BIN)/python -m pytest -m "not slow and not long" $(SPREAD)

test-long: $(VENV)/dev  ## run what CI runs beside them: examples, fuzzers, flows on real processes
	$(BIN)/python -m pytest -m "long and not slow and not hosts" $(SPREAD)

test-all: $(VENV)/dev  ## run every test
	$(BIN)/python -m pytest $(SPREAD)

test-hosts: $(VENV)/hosts  ## run what needs other libraries: models under PEFT, plans in Automodel's hands
	$(BIN)/python -m pytest -m hosts $(SPREAD)

test-rest: $(VENV)/hosts  ## both of these in one run, as CI does
	$(BIN)/python -m pytest -m "(long and not slow) or hosts" $(SPREAD)

# Other versions than the locked ones, each in an environment of its own; docs/versions.md is written. They gate nothing.
BUDGET ?= 1500
WATCH  := tests/versions/watch.py
BARE   := -m pip install --quiet --disable-pip-version-check

test-newest: $(VENV)/dev  ## run tests under the newest versions of everything: BUDGET= seconds
	@test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	@echo "installing the newest versions"
	@.venv-newest/bin/python $(BARE) --upgrade --upgrade-strategy eager --editable '.[dev]'
	.venv-newest/bin/python $(WATCH) newest --locked $(BIN)/python --budget $(BUDGET)

test-oldest: $(VENV)/dev  ## run tests at the lower bounds of pyproject.toml: BUDGET= seconds
	@test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	@$(BIN)/python $(WATCH) bounds > .venv-oldest/constraints.txt
	@echo "installing the lower bounds"
	@.venv-oldest/bin/python $(BARE) --constraint .venv-oldest/constraints.txt --editable '.[dev]'
	.venv-oldest/bin/python $(WATCH) oldest --locked $(BIN)/python --budget $(BUDGET)

test-wild: $(VENV)/dev  ## plan and verify models of other code bases, without inputs; build/wild.jsonl keeps the lines
	@for one in $(WILD); do $(PIP) --no-deps $$one $(SHOWN) || echo "NOT INSTALLED: $$one; its models are listed so"; done
	$(BIN)/python tests/outside/wild/sweep.py

# transformers' source archive holds its top-level tests, in the version that is installed; THEIRS= names a folder of
# one's own. The plans that ranks make are kept beside it.
THEIRS ?= build/theirs
test-theirs: $(VENV)/hosts  ## run tests that transformers and torch wrote, on our plans: TYPES=, OPS= name some
	@mkdir -p $(THEIRS)
	@find $(THEIRS) -name test_tensor_parallel_mixin.py | grep -q . || { \
		version=$$($(BIN)/python -c "from importlib.metadata import version; print(version('transformers'))"); \
		$(PIP) --no-deps --target $(THEIRS) parameterized $(SHOWN); \
		$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: --dest $(THEIRS) \
			transformers==$$version && tar -xzf $(THEIRS)/transformers-$$version.tar.gz -C $(THEIRS) --wildcards '*/tests/*' || \
		echo "NOT TRIED: the sources of transformers $$version could not be fetched"; }
	PYTHONPATH=$(THEIRS) THEIRS=$(THEIRS) AUTOPLAN_CACHE=$(THEIRS)/plans $(BIN)/python -m pytest tests/theirs

test-redteam: $(VENV)/dev  ## hostile small models on real ranks, a table by class: CASES='flags/* norms/*@tp2+sp'
	$(BIN)/python tests/redteam $(foreach one,$(CASES),'$(one)')

lint: $(VENV)/dev  ## ruff, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev  ## ruff, fixing what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/dev  ## mypy
	$(BIN)/mypy

docs: $(VENV)/dev  ## pages of every public function, under build/docs
	$(BIN)/python -m pdoc autoplan '!autoplan\.(?!testing)' --no-show-source -o build/docs

fuzz: $(VENV)/dev  ## hostile files and plans, spoilt in many ways: COUNT= cases each, SEED=
	$(BIN)/python tests/fuzz $(if $(COUNT),--count $(COUNT)) --seed $(or $(SEED),0)

bench: $(VENV)/dev  ## measure planning, import and build; asserts nothing
	$(BIN)/python tests/benchmarks/planning_time.py

bench-gpu: $(VENV)/dev  ## hold estimates against one real GPU (without one: against what an H100 showed)
	$(BIN)/python tests/benchmarks/estimate_gpu.py

wheel: $(VENV)/dev  ## build dist/*.whl
	$(BIN)/python -m build --wheel

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .venv-newest .venv-oldest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

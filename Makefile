# The commands of this repository. Each does all its own set-up, and nothing twice; CMakeLists.txt describes the build.
# Variables, as in `make test PYTHON=python3.12 JOBS=4`:
#   PYTHON               the Python to use; one that has a supported torch is used as it is, and nothing is fetched
#   TORCH                the version of torch to fetch, such as 2.13.0; docs/versions.md has those that work
#   SHARDWISE_TEST_DEPS  a folder with the sources of GoogleTest and Catch2, where there are no packages of them
#   SHARDWISE_DEPS       a folder with nlohmann/json.hpp and xxhash.h, where there are no packages of them, and nothing can be fetched
#   JOBS                 compilers at a time (as many as there are cores and memory for them)
#   RANKS, FRONT, SHORT  of the demo: RANKS=2; FRONT=cpp or python; SHORT=1 for a few steps only
#   MODE                 of the demo: replicate or, in C++, fully_shard or 3d (8 ranks: pipeline, data and tensor parallel)
#   PEERS                of bench: PEERS=1 fetches DeepSpeed, to be measured too
#   SUITES               of test: some of unit_tests, rank_tests, late_tests, program_tests, python_unit, python_ranks, python_interop;
#                        only these are built
#   ROWS                 of test: ROWS=1 runs of rank_tests and python_ranks the rows of test/rows.tsv, of python_unit the package's
#   CHANGED              of test: CHANGED=1 runs what the files that differ from the last commit, or else its own, can break
#   BUDGETS              of test: BUDGETS=1 lists the CPU time that suites and builds took; beyond test/budgets.tsv it fails
#   FRESH_CLONE          of test: FRESH_CLONE=1 also runs the README's commands in a new clone
#   PARTS                of test-parts: some of those that test/parts.py lists
#   TORCHES              of test-torches: some versions of torch, such as "2.11.0 2.15.0"; default: all that we support
#   TRAINERS             of test-trainers: some of test/trainers/packages.tsv, such as "accelerate lightning"; default: all
#   STEPS, DEVICE, AGAIN of gpu: some of its steps (LIST=1 shows them); DEVICE=late has no GPU; AGAIN=1 repeats what has passed
#   KIT, WITHIN, ARCH    of gpu and gpu-kit: the kit's folder (.gpukit); the seconds for all steps; the GPU's architecture (90)
#   PYTHONS              of wheels: PYTHONS="python3.11 python3.13"; they need no torch
#   TRY                  of wheels: TRY=1 installs each wheel in a new environment with a torch of its own, and uses it
#   UNTIL                of test-parts: begin no part that will not be done at this time, in seconds as `date +%s` has them
PYTHON ?=
TORCH ?=
SHARDWISE_TEST_DEPS ?=
SHARDWISE_DEPS ?=
JOBS ?=
RANKS ?=
PYTHONS ?=
TRY ?=
FRONT ?= cpp
MODE ?= replicate
SHORT ?=
SUITES ?=
ROWS ?=
CHANGED ?=
BUDGETS ?=
FRESH_CLONE ?=
PARTS ?=
TORCHES ?=
TRAINERS ?=
UNTIL ?=
STEPS ?=
DEVICE ?= cuda
AGAIN ?=
LIST ?=
KIT ?=
WITHIN ?=
ARCH ?=
PEERS ?=
override SHARDWISE_TEST_DEPS := $(abspath $(SHARDWISE_TEST_DEPS))
override SHARDWISE_DEPS := $(abspath $(SHARDWISE_DEPS))
export SHARDWISE_TEST_DEPS SHARDWISE_DEPS TORCH
.NOTPARALLEL:
.PHONY: help demo test test-torches test-trainers test-all test-parts gpu gpu-kit bench lint format docs wheels archive sdist \
  clean

prepare = @sh scripts/prepare.sh
py = scripts/python
build = $(py) scripts/build.py
jobs = $(if $(JOBS),--jobs $(JOBS))
with_tests = -DSHARDWISE_BUILD_TESTS=ON -DSHARDWISE_BUILD_EXAMPLES=ON -DSHARDWISE_BUILD_BENCHMARKS=ON -DSHARDWISE_TEST_DEPS=$(SHARDWISE_TEST_DEPS)
# Those in Python take C++ models; each of the others is one program.
programs = $(filter-out python_%,$(or $(SUITES),unit_tests rank_tests late_tests program_tests)) \
  $(if $(filter python_%,$(or $(SUITES),python_ranks)),bound_models)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@sed -n '/^# Variables/,/^[^#]/s/^# \{0,1\}//p' Makefile

demo: ## train a small GPT on RANKS ranks, compare with one process, draw a picture
	$(prepare) build "$(PYTHON)"
	@$(build) dev -DSHARDWISE_BUILD_EXAMPLES=ON --target shardwise shardwise_python gpt --install $(jobs)
	@$(py) examples/demo.py --front $(FRONT) --mode $(MODE) $(if $(RANKS),--ranks $(RANKS)) $(if $(SHORT),--short)

test: ## the tests that hold the product, in C++ and Python; skipped ones are listed with their reasons
	$(prepare) test "$(PYTHON)"
	$(if $(CHANGED),,@$(build) dev $(with_tests) --target shardwise shardwise_python $(programs) --install $(jobs))
	@$(py) test/run.py $(if $(SUITES),--suites $(SUITES)) $(if $(ROWS),--rows) $(if $(BUDGETS),--budgets) $(if $(FRESH_CLONE),--fresh-clone) $(if $(CHANGED),--changed $(with_tests) $(jobs))

test-torches: ## build and test with each version of torch that we support, in short, each in a folder of its own
	$(prepare) build "$(PYTHON)"
	@$(py) test/torches.py $(TORCHES) $(if $(SUITES),--suites $(SUITES))

test-trainers: ## published trainers with torch's engine and with ours, compared bit for bit; fetches them from PyPI
	$(prepare) build "$(PYTHON)"
	@$(build) dev --target shardwise shardwise_python --install $(jobs)
	@$(py) test/trainers/compare.py $(TRAINERS)

test-all: test test-parts ## these, and everything that test-parts adds: some hours

test-parts: ## what is too long for every change: more ranks and steps, random programs, benches, sanitizers, mutants
	$(prepare) test "$(PYTHON)"
	@$(build) dev $(with_tests) --target shardwise shardwise_python unit_tests rank_tests late_tests program_tests --install $(jobs)
	@$(py) test/run.py --parts $(PARTS) $(if $(UNTIL),--until $(UNTIL))

gpu: ## everything that a GPU should show, in steps that are not run twice; see docs/gpu.md
	$(if $(KIT),,$(prepare) build "$(PYTHON)")
	@$(if $(KIT),$(or $(PYTHON),python3),$(py)) test/on_gpu.py $(STEPS) --device $(DEVICE) $(if $(KIT),--kit $(KIT)) $(if $(WITHIN),--seconds $(WITHIN)) $(if $(AGAIN),--again) $(if $(LIST),--list)

gpu-kit: ## what `make gpu KIT=.gpukit` needs on a machine that has a GPU, a torch and no network, built and tried here
	@python3 test/gpu_kit.py $(if $(PYTHON),--python $(PYTHON)) $(if $(TORCH),--torch $(TORCH)) $(if $(ARCH),--arch $(ARCH)) $(if $(KIT),--folder $(KIT))

bench: ## what wrapping costs, beside torch's own: time, instructions, copies, memory, in short
	$(prepare) build "$(PYTHON)"
	@$(build) dev -DSHARDWISE_BUILD_BENCHMARKS=ON --target shardwise shardwise_python meters host_cost setup_cost plan_models memory_steps rank_steps collectives overlap pipeline_steps modelled_peers --install $(jobs)
	$(if $(PEERS),@$(py) benchmarks/peers.py)
	@$(py) benchmarks/run.py --quick --instructions

lint: ## formats, types, clang-tidy and the house rules; changes nothing
	$(prepare) lint "$(PYTHON)"
	@$(py) scripts/lint.py

format: ## bring C++ and Python files into their format
	$(prepare) lint "$(PYTHON)"
	@$(py) scripts/lint.py --fix

docs: ## check links and commands of the pages, and make a site of them in build/docs, with search and both references
	$(prepare) docs "$(PYTHON)"
	@$(py) scripts/check_docs.py
	@$(build) dev --target shardwise shardwise_python --install $(jobs)
	@$(py) scripts/make_docs.py

wheels: ## wheels of the package in dist/, for this Python or for those of PYTHONS
	$(prepare) build "$(PYTHON)"
	@$(py) scripts/wheels.py $(PYTHONS)
	$(if $(TRY),@$(py) test/try_wheels.py $(PYTHONS))

archive: ## the C++ library with LICENSE and NOTICE in dist/, for programs with LibTorch and without Python
	$(prepare) build "$(PYTHON)"
	@$(py) scripts/archive.py

sdist: ## the sources in dist/, from which pip builds the package
	$(prepare) test "$(PYTHON)"
	@$(py) setup.py --quiet sdist --dist-dir dist

clean: ## remove what was built; .venv stays, for it is costly to fetch
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	rm -rf python/shardwise/lib python/shardwise/include python/shardwise/share
	rm -f python/shardwise/_build_info.py python/shardwise/*.so

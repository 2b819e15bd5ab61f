# The commands of this repository. Each does all its own set-up, and nothing twice; CMakeLists.txt describes the build.
# Variables, as in `make test PYTHON=python3.12 JOBS=4`:
#   PYTHON               the Python to use; one that has a supported torch is used as it is, and nothing is fetched
#   SHARDWISE_TEST_DEPS  a folder with the sources of GoogleTest and Catch2, where there are no packages of them
#   JOBS                 compilers at a time (as many as there are cores and memory for them)
#   RANKS, FRONT, SHORT  of the demo: 2 ranks; FRONT=cpp or python; SHORT=1 for a few steps only
#   MODE                 of the demo: replicate or, in C++, fully_shard
#   PEERS                of bench: PEERS=1 fetches DeepSpeed, to be measured too
#   SUITES               of the tests: some of unit_tests, rank_tests, program_tests, pytest; only these are built
#   FRESH_CLONE          of the tests: FRESH_CLONE=1 also runs the README's commands in a new clone
PYTHON ?=
SHARDWISE_TEST_DEPS ?=
JOBS ?=
RANKS ?= 2
FRONT ?= cpp
MODE ?= replicate
SHORT ?=
SUITES ?=
FRESH_CLONE ?=
PEERS ?=
override SHARDWISE_TEST_DEPS := $(abspath $(SHARDWISE_TEST_DEPS))
export SHARDWISE_TEST_DEPS
.NOTPARALLEL:
.PHONY: help demo test test-fast test-sanitize bench lint format docs wheel clean

prepare = @sh scripts/prepare.sh
py = scripts/python
build = $(py) scripts/build.py
jobs = $(if $(JOBS),--jobs $(JOBS))
with_tests = -DSHARDWISE_BUILD_TESTS=ON -DSHARDWISE_BUILD_EXAMPLES=ON -DSHARDWISE_BUILD_BENCHMARKS=ON -DSHARDWISE_TEST_DEPS=$(SHARDWISE_TEST_DEPS)
suites = $(if $(SUITES),--suites $(SUITES))
# pytest runs examples, benchmarks and test programs; each of the other suites is one program.
parts = $(if $(SUITES),$(if $(filter pytest,$(SUITES)),,--target shardwise shardwise_python $(SUITES)))

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@sed -n '/^# Variables/,/^[^#]/s/^# \{0,1\}//p' Makefile

demo: ## train a small GPT on RANKS ranks, compare with one process, draw a picture
	$(prepare) build "$(PYTHON)"
	@$(build) dev -DSHARDWISE_BUILD_EXAMPLES=ON --target shardwise shardwise_python gpt --install $(jobs)
	@$(py) examples/demo.py --front $(FRONT) --mode $(MODE) --ranks $(RANKS) $(if $(SHORT),--short)

test: ## all tests, in C++ and Python; skipped ones are listed with their reasons
	$(prepare) test "$(PYTHON)"
	@$(build) dev $(with_tests) $(parts) --install $(jobs)
	@$(py) test/run.py $(suites) $(if $(FRESH_CLONE),--fresh-clone)

test-fast: ## the tests without the slow ones, and without the row check
	$(prepare) test "$(PYTHON)"
	@$(build) dev $(with_tests) $(parts) --install $(jobs)
	@$(py) test/run.py --fast $(suites)

test-sanitize: ## the C++ tests with the sanitizers for addresses, undefined behaviour and threads in the library
	$(prepare) test "$(PYTHON)"
	@$(build) dev $(with_tests) --target unit_tests rank_tests program_tests $(jobs)
	@for kind in address undefined thread; do $(build) $$kind -DSHARDWISE_BUILD_PYTHON=OFF \
	  -DSHARDWISE_SANITIZE=$$kind --target shardwise $(jobs) || exit 1; done
	@$(py) test/run.py --sanitizers address undefined thread

bench: ## what wrapping costs, beside torch's own: time, instructions, copies, memory, in short
	$(prepare) build "$(PYTHON)"
	@$(build) dev -DSHARDWISE_BUILD_BENCHMARKS=ON --target shardwise shardwise_python meters host_cost setup_cost plan_models memory_steps rank_steps collectives overlap modelled_peers --install $(jobs)
	$(if $(PEERS),@$(py) benchmarks/peers.py)
	@$(py) benchmarks/run.py --quick --instructions

lint: ## formats, types, clang-tidy and the house rules; changes nothing
	$(prepare) lint "$(PYTHON)"
	@$(py) scripts/lint.py

format: ## bring C++ and Python files into their format
	$(prepare) lint "$(PYTHON)"
	@$(py) scripts/lint.py --fix

docs: ## check the documentation: its links lead somewhere, its commands exist
	$(prepare) build "$(PYTHON)"
	@$(py) scripts/check_docs.py

wheel: ## a wheel of the package in dist/
	$(prepare) test "$(PYTHON)"
	@SHARDWISE_BUILD_DIR=build/dev $(py) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean: ## remove what was built; .venv stays, for it is costly to fetch
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	rm -rf python/shardwise/lib python/shardwise/include python/shardwise/share
	rm -f python/shardwise/_build_info.py python/shardwise/*.so

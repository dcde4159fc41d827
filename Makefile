# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Each target does the set-up that it needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv/bin
PY := $(VENV)/python
FUZZ_SECONDS ?= 40
export PYTHONUNBUFFERED := 1

.PHONY: help demo test setup setup-cpu env build lint format bench models models-packed check-results plots serve-packed nightly test-torch test-gpu \
        test-cpp test-sanitize test-python fuzz wheel
.NOTPARALLEL:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:
	@tools/setup.sh system venv

setup-cpu:
	@tools/setup.sh system venv cpu

setup:  ## system packages, .venv, C++ build
	@tools/setup.sh

build: setup  ## the same

demo: setup-cpu  ## a model trained on MovieLens, transformed, served by C++, compared
	$(PY) -m examples.movielens

test: setup test-cpp test-sanitize test-python  ## all tests: C++, sanitizers, fuzzing, Python

test-cpp: setup  ## C++ tests
	@printf '\n== C++ tests\n'
	ctest --test-dir build/cpu -j 2 --output-on-failure --no-tests=error

test-sanitize: env  ## runtime and server under ASan and UBSan and under TSan, and the fuzz targets
	@tools/setup.sh sanitize sanitize-thread
	@printf '\n== C++ tests under ASan and UBSan, fuzz targets for FUZZ_SECONDS=$(FUZZ_SECONDS)\n'
	cmake -DIKBO_FUZZ_SECONDS=$(FUZZ_SECONDS) build/sanitize >/dev/null
	ctest --test-dir build/sanitize -j 2 --output-on-failure --no-tests=error
	@printf '\n== C++ tests under TSan\n'
	ctest --test-dir build/sanitize-thread -j 2 --output-on-failure --no-tests=error

fuzz: FUZZ_SECONDS := 600
fuzz: env  ## the fuzz targets, ten minutes each; FUZZ_SECONDS=N for another time
	@tools/setup.sh sanitize
	cmake -DIKBO_FUZZ_SECONDS=$(FUZZ_SECONDS) build/sanitize >/dev/null
	ctest --test-dir build/sanitize -j 2 -L fuzz --output-on-failure --no-tests=error

test-python: setup  ## Python tests
	@tools/setup.sh sanitize-replay
	@printf '\n== Python tests\n'
	OMP_NUM_THREADS=$$(( ($$(nproc) + 1) / 2 )) $(PY) -m pytest -q -n 2 --dist loadfile

test-gpu:  ## tests of the CUDA kernels, on a machine with an H100 or H200
	@tools/test_gpu.sh

lint: setup  ## clang-format, clang-tidy, ruff, mypy, layers, sizes
	@tools/lint.sh

format: env  ## rewrite the sources as the formatters want them
	@tools/lint.sh --fix

# What is timed keeps the memory that a call frees, as ikbo-server does: else glibc hands it back
# after some calls and not after others, and the next one pays for it.
bench models: export MALLOC_MMAP_THRESHOLD_ := 33554432
bench models: export MALLOC_TOP_PAD_ := 67108864
bench models: export MALLOC_TRIM_THRESHOLD_ := 1073741824
bench: setup-cpu  ## measure operators, training, nets, the served demo and the server here, into bench/results/
	$(PY) bench/bench_ops_cpu.py
	$(PY) bench/bench_training.py
	$(PY) -m bench.bench_end_to_end
	$(PY) -m examples.movielens --results
	$(PY) -m bench.bench_serve

MODELS := build/models-site
$(MODELS)/.installed: requirements/models.txt
	rm -rf $(MODELS)
	$(PY) -m pip install --disable-pip-version-check --no-deps --target $(MODELS) -r $<
	touch $@

models: setup-cpu $(MODELS)/.installed  ## what the pass makes of public models, into docs/models.md
	PYTHONPATH=$(MODELS) $(PY) -m bench.bench_models --packages

# A GPU machine without network has another Python than this one; sources that pip builds are pure.
GPU_PYTHON ?= 3.12
MODELS_GPU := build/models-gpu
PLATFORMS := $(foreach p,manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014,--platform $(p)_x86_64)
models-packed: env  ## the public models' packages for a GPU machine, as build/models-gpu.tgz
	rm -rf $(MODELS_GPU)
	$(PY) -m pip install --disable-pip-version-check --no-deps --no-compile --target $(MODELS_GPU) \
	  --python-version $(GPU_PYTHON) $(PLATFORMS) -r requirements/models.txt
	tar -czf $(MODELS_GPU).tgz --exclude=__pycache__ -C $(MODELS_GPU) .

KSERVE := build/kserve-venv
$(KSERVE)/.installed: requirements/kserve.txt
	$(PY) -m venv --clear $(KSERVE)
	$(KSERVE)/bin/pip install --disable-pip-version-check -r $<
	touch $@

test-kserve: setup-cpu $(KSERVE)/.installed  ## the server asked by KServe's own clients
	IKBO_KSERVE_PYTHON=$(CURDIR)/$(KSERVE)/bin/python $(PY) -m pytest -q tests/server/test_kserve.py tests/server/test_kserve_manifests.py

RAY := build/ray-venv
$(RAY)/.installed: requirements/ray.txt
	$(PY) -m venv --clear $(RAY)
	$(RAY)/bin/pip install --disable-pip-version-check -r $<
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ikbo.pth
	touch $@

test-ray: setup-cpu $(RAY)/.installed  ## ikbo.ray on a Ray cluster of two workers on this machine
	IKBO_RAY_PYTHON=$(CURDIR)/$(RAY)/bin/python $(PY) -m pytest -q tests/server/test_ray.py

check-results: env  ## list the files of bench/results/ that are older than the code they measure
	$(PY) tools/check_results.py

plots: env  ## draw bench/results/ into build/plots/
	$(PY) tools/plots.py

serve-packed: setup  ## the server and its libraries for a GPU machine, as build/gpu-serve.tgz
	@tools/gpu_serve.sh pack

nightly: setup  ## what takes too long for `make test`
	$(PY) -m examples.movielens.ablation
	$(PY) -m tests.transform.fuzz --seeds 2000 --results
	test -f build/demo/ikbo.pt2 || $(PY) -m examples.movielens
	$(PY) -m bench.soak build/demo/ikbo.pt2 --results

test-torch: setup  ## operator tests under another PyTorch: make test-torch TORCH=2.15.0
	@tools/test_torch.sh "$(TORCH)"

wheel: env  ## build the wheel into dist/
	$(PY) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

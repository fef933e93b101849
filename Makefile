# `make train` and `make test` set up everything they need in .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# programs that tests start find zk compiled
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-host test-device coverage mutate soak simulate bench bench-peers bench-nvme bench-tiled bench-plan gpu lint site clean

train: $(READY)
	$(BIN)/python -m zk train $(ARGS)

# on the host, and on two CUDA devices that are software (tests/softgpu); in three processes, as tests wait too, a file in one of them; in one: make test ARGS="-n 0"
test: test-host test-device

PYTEST := -m pytest -n 3 --dist loadfile -p no:benchmark -p tests.threads

test-host: $(READY)
	$(BIN)/python $(PYTEST) $(ARGS)

test-device: $(READY)
	$(BIN)/python $(PYTEST) -p tests.softgpu.plugin $(ARGS)

# the share of the CUDA path's lines that the tests on the software GPU execute, with what kernels and groups do in host memory
CUDA_PATH := zk/offload/tiers.py,zk/offload/drive.py,zk/memory.py,zk/kernels/*.py,zk/parallel/comm.py

coverage: $(READY)
	rm -rf runs/coverage
	mkdir -p runs/coverage
	$(BIN)/coverage run $(PYTEST) -p tests.softgpu.plugin $(ARGS)
	$(BIN)/coverage run $(PYTEST) tests/core tests/test_cpu_adam.py tests/test_eight_bit.py $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include='$(CUDA_PATH)'

# removes every wait for copies between device and host, one at a time: some test must fail (about half an hour on two cores);
# 20 faults in a file, chosen at random: make mutate ARGS="zk/unit.py --host tests/core/test_units.py"
mutate: $(READY)
	$(BIN)/python -m tests.mutate $(ARGS)

# kills a training run 50 times, while it loads, steps and saves, and starts it again: it must go on bit for bit (about 3 minutes);
# then one of two ranks as often (about 6 minutes)
soak: $(READY)
	$(BIN)/python -m tests.soak $(ARGS)
	$(BIN)/python -m tests.soak --ranks 2 $(ARGS)

# ten thousand jobs from seeds, with faults of drives, ranks and checkpoints, against plain PyTorch
simulate: $(READY)
	$(BIN)/python -m tests.simulate --seeds 10000 $(ARGS)

# the table and the picture are made also where a benchmark failed; what failed is named, and make ends with its status
bench: $(READY)
	mkdir -p runs
	$(BIN)/python -m pytest benchmarks/bench_*.py --benchmark-columns=min,median,stddev,rounds --benchmark-json=runs/bench.json $(ARGS); status=$$?; \
	$(BIN)/python benchmarks/report.py runs/bench.json --plot runs/bench.png && exit $$status

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# the documentation as pages in site/; a broken link, an unknown reference or a page that nobody finds is an error
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# DeepSpeed beside zk in one table; installs DeepSpeed into an environment of its own
bench-peers: $(READY) $(VENV)/.peers
	$(BIN)/python benchmarks/peers/compare.py $(ARGS)

# a step with everything on the drive beside DeepSpeed's
NVME ?= runs/nvme
bench-nvme: $(READY) $(VENV)/.peers
	mkdir -p $(NVME)
	ZK_BENCH_NVME=$(NVME) $(BIN)/python benchmarks/peers/compare.py --systems deepspeed_zero3_nvme zk_stage3_nvme zk_stage3_nvme_cached zk_stage3_nvme_bf16_moments $(ARGS)

# on a machine with a GPU: all that is to be tested and measured there, in less than ten minutes, and a dated report in benchmarks/results/;
# some of it: make gpu ARGS='--sections floors,12/stage2'; without a GPU, to see that all parts work: make gpu ARGS='--dry-run --out runs/dry'
# by PYTHON where its torch sees a GPU, and then nothing is installed; else by the environment of the tests
gpu:
	if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
		$(PYTHON) benchmarks/gpu.py --nvme $(NVME) $(ARGS); \
	else \
		$(MAKE) $(READY) && $(BIN)/python benchmarks/gpu.py --nvme $(NVME) $(ARGS); \
	fi

# memory that one large linear layer needs, whole and in tiles (4 GiB of drive)
bench-tiled: $(READY)
	mkdir -p $(NVME)
	$(BIN)/python benchmarks/tiled_memory.py $(NVME) $(ARGS)

# what `zk plan` says against the peak memory of real runs (3 GiB of drive)
bench-plan: $(READY)
	mkdir -p $(NVME)
	$(BIN)/python benchmarks/plan_vs_peak.py --folder $(NVME) $(ARGS)

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

$(VENV)/.peers: $(READY)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check ninja setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation deepspeed==0.19.8
	touch $@

clean:
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache

# make demo · make test · make test-all · make test-newest · make planted · make lint · make compare · make bench · make plots · make notebook · make gpu-check · make clean
PYTHON ?= python3
PY := .venv/bin/python
STUDY ?= config/studies/controls.py
GPU_VENV ?= .venv-gpu

.PHONY: demo test test-all test-newest planted lint compare bench plots notebook gpu-check clean

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/ready-test: .venv/ready requirements-test.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@touch $@

# train ten short runs on the source code of Python's standard library, and compare them: the plain GPT with four
# seeds, short convolutions and a write-up's head routing with three each; two minutes on two quiet cores
demo: .venv/ready
	$(PY) data/pystdlib/prepare.py
	$(PY) compare.py config/studies/demo.py

# a process per core, each with one thread (threads that wait for each other spin); a process that has none
# left takes tests of another, which else keeps those of a file together, as they share what is made for them
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal --durations=10

# what to run before a push: the core's tests and the study's, but for those marked slow
test: .venv/ready-test
	$(PYTEST) -m "not slow" tests/core tests/study

# every test, as continuous integration runs them
test-all: .venv/ready-test
	$(PYTEST)

# the tests that go by transformers, with its newest version, which replaces the pinned one in .venv
test-newest: .venv/ready-test
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade "transformers>=5.4,<6"
	$(PYTEST) tests/lab/hub

# faults that the tests must find, each planted alone in a copy of the repository; some three minutes
planted: .venv/ready-test
	$(PY) tests/planted.py

# long lines, unused names, named lambdas: pyproject.toml says what
lint: .venv/ready-test
	$(PY) -m ruff check .

# STUDY=config/studies/scores.py for another one; it goes on where it stopped
compare: .venv/ready
	$(PY) compare.py $(STUDY)

bench: .venv/ready
	$(PY) bench.py

plots: .venv/ready
	$(PY) plot_curves.py

# run the notebooks of docs/ in a fresh copy of the repository and store their outputs
notebook: .venv/ready-test
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/lab $(PY) tests/docs/refresh_notebook.py

# compile every training step for sm_90, sm_80 and sm_89 on a machine without a GPU (docs/gpu.md);
# QUICK=1: six entries; ENTRIES="acag sink": those; JOBS: processes at a time
gpu-check:
	$(PYTHON) -m tests.lab.gpu.environment $(GPU_VENV)
	$(GPU_VENV)/bin/python -m tests.lab.gpu.check $(ENTRIES) $(if $(QUICK),--quick) $(if $(CARDS),--cards $(CARDS)) \
	    $(if $(JOBS),--jobs=$(JOBS))

clean:
	rm -rf .venv .venv-gpu out

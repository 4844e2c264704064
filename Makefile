# make demo · make test · make lint · make compare · make bench · make plots · make clean
PYTHON ?= python3
PY := .venv/bin/python
STUDY ?= config/studies/all.py

.PHONY: demo test lint compare bench plots clean

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/ready-test: .venv/ready requirements-test.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@touch $@

# train a plain GPT and one variant on Python's own source code, three seeds each, and compare them
demo: .venv/ready
	$(PY) data/pystdlib/prepare.py
	$(PY) compare.py config/studies/demo.py

# a process per core, each with one thread: threads that wait for each other spin
test: .venv/ready-test
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto

# long lines, unused names, named lambdas: pyproject.toml says what
lint: .venv/ready-test
	$(PY) -m ruff check .

# STUDY=config/studies/routing.py for another one; it goes on where it stopped
compare: .venv/ready
	$(PY) compare.py $(STUDY)

bench: .venv/ready
	$(PY) bench.py

plots: .venv/ready
	$(PY) plot_curves.py

clean:
	rm -rf .venv out

# make demo · make test · make bench · make plots · make clean
PYTHON ?= python3
PY := .venv/bin/python
DEMO := out/demo

.PHONY: demo test bench plots clean

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/ready-test: .venv/ready requirements-test.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@touch $@

# train a small GPT on Python's own source code, score it, sample from it, draw its curves
demo: .venv/ready
	$(PY) data/pystdlib/prepare.py
	$(PY) train.py config/demo.py --out_dir=$(DEMO) --resume
	$(PY) evaluate.py --ckpt $(DEMO)
	@echo
	$(PY) sample.py --ckpt $(DEMO) --start "def " --max_new_tokens 400
	@echo
	$(PY) plot_curves.py $(DEMO)

# a process per core, each with one thread: threads that wait for each other spin
test: .venv/ready-test
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto

bench: .venv/ready
	$(PY) bench.py

plots: .venv/ready
	$(PY) plot_curves.py

clean:
	rm -rf .venv out

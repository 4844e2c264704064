#!/usr/bin/env bash
# What needs a CUDA GPU, in eight minutes: ./gpu_check.sh --help. PY names the interpreter.
cd "$(dirname "$0")" || exit 1
python="${PY:-python3}"
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null; then
    echo "gpu_check: $python finds no torch: activate .venv, or set PY to a Python that has it" >&2
    exit 1
fi
exec "$python" -m tests.lab.gpu.on_card "$@"

#!/usr/bin/env bash
# What needs a CUDA GPU, in eight minutes: ./gpu_check.sh --help. PY names the interpreter.
cd "$(dirname "$0")" && exec "${PY:-python3}" -m tests.lab.gpu.on_card "$@"

#!/usr/bin/env bash
# Everything that needs a CUDA GPU, one part at a time, each under ten minutes:
#   ./gpu_check.sh test     the test suite on a machine with CUDA (torch 2.11 to 2.13)
#   ./gpu_check.sh bench    bench.py at 12 layers, 12 heads, 768 wide, context 1,024, bf16, compiled; NANOGPT=/path runs nanoGPT beside it
#   ./gpu_check.sh train    both recipes on the same bytes, same tokens, scored on the whole test split, with curves
# Results go to $OUT (default out/gpu). PY names the interpreter, DATASET a byte dataset (default pystdlib), STEPS and SHAPE the training.
set -euo pipefail
cd "$(dirname "$0")"
PY=${PY:-python3} OUT=${OUT:-out/gpu} DATASET=${DATASET:-pystdlib} STEPS=${STEPS:-1500}
SHAPE=${SHAPE:---n_layer=6 --n_head=6 --n_embd=384 --block_size=512 --batch_size=64 --eval_interval=250}
mkdir -p "$OUT"

case "${1:-}" in
test)
  "$PY" -m pytest -q 2>&1 | tee "$OUT/tests.txt" ;;
bench)
  "$PY" bench.py --rounds 11 --json "$OUT/bench.json" ${NANOGPT:+--nanogpt "$NANOGPT"} 2>&1 | tee "$OUT/bench.txt" ;;
train)
  [ -f "data/$DATASET/meta.json" ] || "$PY" "data/$DATASET/prepare.py"
  for recipe in gpt2 modern; do
    "$PY" train.py --dataset="$DATASET" $SHAPE --max_iters="$STEPS" --recipe="$recipe" --out_dir="$OUT/$recipe" --overwrite
  done
  "$PY" evaluate.py --ckpt "$OUT/gpt2" --ckpt "$OUT/modern" --json "$OUT/scores.json"
  "$PY" plot_curves.py "$OUT/gpt2" "$OUT/modern" --out "$OUT" ;;
*)
  sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

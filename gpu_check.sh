#!/usr/bin/env bash
# What needs a CUDA GPU, an hour at most, what is worth most first:
#   ./gpu_check.sh                  every part, in this order; one that fails or takes too long stops no other
#   ./gpu_check.sh agree bench      these parts
#
# What each answers, and how many minutes it should take; after LIMIT seconds (500) it is asked to stop:
#   agree        4  does every mechanism compute what the CPU does in float64: float32, TF32, bf16, eager;
#                   some compiled too
#   bench        5  training at 124M, bf16, compiled: tokens/s, MFU, memory, beside nanoGPT in the same run
#   decode       2  tokens/s of cached decoding at 124M after 128 to 1,024 tokens, beside nanoGPT
#   study        6  does compare.py run as it should: two mechanisms, two seeds, tiny scale, four runs at once
#   compiled     8  does every mechanism agree when it is compiled
#   mechanisms   8  the training step of each beside the plain GPT's at 12/12/768; MECHS names others
#   test         8  the test suite on a machine with CUDA (torch 2.11 to 2.15)
#   train        6  both recipes on the same bytes, same tokens, scored on the whole test split, with curves
#   long         8  peak memory at context 16,384; routing and plain at 1,024 and 16,384;
#                   decoding with routing; pruned heads
#
# Figures go to $OUT (out/gpu), a few files a part, written row by row: what is stopped keeps its rows.
# log.txt holds all that is printed, summary.txt a line a part. Run folders stay in $RUNS (out/gpu-runs).
# NANOGPT is a nanoGPT checkout, PY the interpreter, JOBS the processes of agree and compiled (half of the
# cores), DATASET a byte dataset (pystdlib), STEPS and SHAPE the training.
set -euo pipefail
cd "$(dirname "$0")"
PLAN="agree bench decode study compiled mechanisms test train long"
PY=${PY:-python3} OUT=${OUT:-out/gpu} RUNS=${RUNS:-out/gpu-runs} LIMIT=${LIMIT:-500}
export PYTHONUNBUFFERED=1
DATASET=${DATASET:-pystdlib} JOBS=${JOBS:-$(( ($(nproc) + 1) / 2 ))}
SIZE_124M="--vocab_size 50304 ${NANOGPT:+--nanogpt $NANOGPT}"

# ---- what parts are made of ----

# prepared NAME: its data are there, or made now
prepared() { [ -f "data/$1/meta.json" ] || "$PY" "data/$1/prepare.py"; }

# bench NAME ARGS...: bench.py, its figures in $OUT/NAME.json
bench() { "$PY" bench.py "${@:2}" --json "$OUT/$1.json"; }

# contexts NAME ARGS...: decoding after long contexts, likewise
contexts() { "$PY" -m lab.bench.contexts "${@:2}" --json "$OUT/$1.json"; }

# each COMMAND...: run it; a failure is remembered for the end of the part
code=0
each() { "$@" || code=1; }

part() {
  case "$1" in
  agree)
    each "$PY" -m tests.lab.gpu.agree --jobs "$JOBS" --out "$OUT/agree.jsonl"
    each "$PY" -m tests.lab.gpu.agree --quick --compile --recipes modern --jobs "$JOBS" \
      --out "$OUT/agree.jsonl" ;;
  bench)
    bench bench $SIZE_124M --what train --batch_size "${BATCH:-16}" --rounds 11 ;;
  decode)
    contexts decode 128 256 512 1024 $SIZE_124M --batch_size 1 --rounds 9 --steps 20 ;;
  study)
    prepared pystdlib
    STUDY=(config/studies/demo.py --mechanisms=acag,output_gate --seeds=1,2 --jobs_per_gpu=4
           --question="Does a study run as it should on a GPU?" --out_dir="$RUNS/study")
    # what is stopped here is reported as far as it came
    timeout --foreground --signal=INT "$((LIMIT * 4 / 5))" "$PY" compare.py "${STUDY[@]}" || true
    each "$PY" compare.py report "${STUDY[@]}"
    cp "$RUNS/study/results.json.gz" "$OUT/study.json.gz" ;;
  compiled)
    each "$PY" -m tests.lab.gpu.agree --compile --recipes modern --jobs "$JOBS" --out "$OUT/agree.jsonl" ;;
  mechanisms)
    ALL=acag,routing_moh,sink,constraint_a,window,acag_detach,all_on,output_gate,unet_concat
    ALL=$ALL,a2c_temperature,roles,fox,relative_bias,xsa,key_offset,sentinel,agency
    bench mechanisms --mechanisms "${MECHS:-$ALL}" --rounds 7 --steps 5 ;;
  test)
    WORKERS=$("$PY" -c "import xdist" 2>/dev/null && echo "-n 4" || true)
    "$PY" -m pytest -q $WORKERS ;;
  train)
    prepared "$DATASET"
    SHAPE=${SHAPE:---n_layer=6 --n_head=6 --n_embd=384 --block_size=512 --batch_size=64 --eval_interval=250}
    for recipe in gpt2 modern; do
      "$PY" train.py --dataset="$DATASET" $SHAPE --max_iters="${STEPS:-1500}" --recipe="$recipe" \
        --out_dir="$RUNS/$recipe" --overwrite
      cp "$RUNS/$recipe/log.jsonl" "$OUT/train-$recipe.jsonl"
    done
    "$PY" evaluate.py --ckpt "$RUNS/gpt2" --ckpt "$RUNS/modern" --json "$OUT/scores.json"
    "$PY" plot_curves.py "$RUNS/gpt2" "$RUNS/modern" --out "$OUT" ;;
  long)
    ONE="--n_layer 2 --n_head 12 --n_embd 768 --batch_size 1" TIMES="--rounds 7 --steps 5"
    ALL=routing_moh,a2c_key_bias,constraint_a,acag_detach,acag,window,output_gate_elementwise,sink,all_on
    each bench memory --what memory $ONE --block_size 16384 --mechanisms "${MECHS:-$ALL}"
    for context in 1024 16384; do
      each bench routing-$context --what train $ONE --block_size $context $TIMES \
        --mechanisms routing_moh
    done
    each contexts contexts 1024 4096 16384 --batch_size 1 $TIMES
    each bench pruned --heads_off 0 .25 .5 .75 $TIMES ;;
  esac
  return "$code"
}

# ---- parts one after the other ----

# limited NAME: that part in a process group of its own, asked to stop after LIMIT seconds
limited() {
  set -m  # else Ctrl-C would not reach what runs in the background
  timeout --signal=INT --kill-after=30 "$LIMIT" bash gpu_check.sh inside "$1" \
    > >(tee -ia "$OUT/log.txt") 2>&1 &
  running=$!
  set +m
  while kill -0 "$running" 2>/dev/null; do wait "$running" || true; done
  wait "$running"
}

mkdir -p "$OUT" "$RUNS"
if [ "${1:-}" = inside ]; then
  trap 'exit 130' INT
  trap 'kill -9 $(jobs -p) 2>/dev/null || true' EXIT
  part "$2"
  exit
fi
[ $# -gt 0 ] || set -- $PLAN
for name in "$@"; do
  case " $PLAN " in *" $name "*) ;; *) sed -n '2,/^set/s/^# \{0,1\}//p' gpu_check.sh; exit 2 ;; esac
done
failed=0 running= stopped= lines=
trap 'stopped=1; [ -z "$running" ] || kill -INT "$running" 2>/dev/null || true' INT TERM HUP
for name in "$@"; do
  began=$SECONDS result=0
  printf '\n---- %s ----\n' "$name"
  limited "$name" || result=$?
  case $result in
    0) word=done ;;
    124 | 137) word="cut short" ;;
    *) word=failed failed=1 ;;
  esac
  line=$(printf '%-12s %-10s %4d s' "$name" "$word" $((SECONDS - began)))
  echo "$line" >> "$OUT/summary.txt"
  lines+="$line"$'\n'
  [ -z "$stopped" ] || break
done
printf '\n%s' "$lines"
exit $failed

#!/usr/bin/env bash
# The first 40 minutes on a CUDA GPU, what is worth most first:
#   ./gpu_check.sh                  every part, in this order; one that fails or takes too long stops no other
#   ./gpu_check.sh agree bench      these parts
#
# What each answers, and how many minutes it should take; after LIMIT seconds (500) it is asked to stop:
#   agree        4  does every mechanism compute what the CPU does in float64: float32, TF32, bf16, eager;
#                   some compiled too
#   bench        5  training at 124M, bf16, compiled: tokens/s, MFU, memory, beside nanoGPT in the same run
#   decode       2  tokens/s of cached decoding at 124M after 128 to 1,024 tokens, beside nanoGPT
#   study        6  does compare.py run as it should: two mechanisms, two seeds, tiny scale, four runs at once
#   graphs       3  what CUDA graphs gain for a small model (--compile_mode reduce-overhead)
#   compiled     8  does every mechanism agree when it is compiled
#   mechanisms   8  the training step of each beside the plain GPT's at 12/12/768; MECHS names others
#   test         8  the test suite on a machine with CUDA (torch 2.11 to 2.15)
#   train        6  both recipes on the same bytes, same tokens, scored on the whole test split, with curves
#   long         8  peak memory at context 16,384; routing packed, dense and plain at 1,024 and 16,384;
#                   decoding with routing; pruned heads
#   heads        8  one life of heads at 12/12/768: moved, pruned, grown, killed in the middle and resumed
#   constraints  6  constraint heads on synthetic labels at 12/12/768, beside a plain GPT: scores against
#                   probes, heads skipped, and an audit page
#   finetune     8  a plain GPT of 12/12/768, then ACAG over it on documents, then gates, head states and late
#                   skips; few-shot before and after, detectors, and out as a folder
#   compare      8  a study at the middle scale on enwiki15, COMPARE_STEPS steps; call again to go on
#
# Figures go to $OUT (out/gpu), a few files a part, written row by row: what is stopped keeps its rows.
# log.txt holds all that is printed, summary.txt a line a part. Run folders stay in $RUNS (out/gpu-runs).
# NANOGPT is a nanoGPT checkout, PY the interpreter, JOBS the processes of agree and compiled (half of the
# cores), DATASET a byte dataset (pystdlib), STEPS and SHAPE the training, STUDY a study.
set -euo pipefail
cd "$(dirname "$0")"
PLAN="agree bench decode study graphs compiled mechanisms test train long heads constraints finetune compare"
PY=${PY:-python3} OUT=${OUT:-out/gpu} RUNS=${RUNS:-out/gpu-runs} LIMIT=${LIMIT:-500}
export PYTHONUNBUFFERED=1
DATASET=${DATASET:-pystdlib} JOBS=${JOBS:-$(( ($(nproc) + 1) / 2 ))}
SIZE_124M="--vocab_size 50304 ${NANOGPT:+--nanogpt $NANOGPT}"

# ---- what parts are made of ----

# prepared NAME: its data are there, or made now
prepared() { [ -f "data/$1/meta.json" ] || "$PY" "data/$1/prepare.py"; }

# bench NAME ARGS...: bench.py, its figures in $OUT/NAME.json
bench() { "$PY" bench.py "${@:2}" --json "$OUT/$1.json"; }

# study NAME SECONDS ARGS...: compare.py for so long, its results in $OUT/NAME.json.gz
study() {
  local name=$1 seconds=$2 code=0
  set -- "${@:3}" --out_dir="$RUNS/$name"
  timeout --foreground --signal=INT "$seconds" "$PY" compare.py "$@" || true
  "$PY" compare.py "$@" --report_only || code=$?
  cp "$RUNS/$name/results.json.gz" "$OUT/$name.json.gz"
  return "$code"
}

# each COMMAND...: run it; a failure is remembered for the end of the part
code=0
each() { "$@" || code=1; }

part() {
  case "$1" in
  agree)
    each "$PY" -m tests.gpu.agree --jobs "$JOBS" --out "$OUT/agree.jsonl"
    each "$PY" -m tests.gpu.agree --quick --compile --recipes modern --jobs "$JOBS" \
      --out "$OUT/agree.jsonl" ;;
  bench)
    bench bench $SIZE_124M --what train --batch_size "${BATCH:-16}" --rounds 11 ;;
  decode)
    bench decode $SIZE_124M --contexts 128 256 512 1024 --batch_size 1 --rounds 9 --steps 20 --no-compile ;;
  study)
    prepared pystdlib
    study study "$((LIMIT * 4 / 5))" config/studies/demo.py --mechanisms=acag,output_gate --seeds=1,2 \
      --question="Does a study run as it should on a GPU?" --jobs_per_gpu=4 ;;
  graphs)
    SMALL="--what train --n_layer 4 --n_head 4 --n_embd 128 --block_size 256 --batch_size 16 --rounds 11"
    for mode in default reduce-overhead; do
      each bench "graphs-$mode" $SMALL --compile_mode "$mode" ${NANOGPT:+--nanogpt "$NANOGPT"}
    done ;;
  compiled)
    each "$PY" -m tests.gpu.agree --compile --recipes modern --jobs "$JOBS" --out "$OUT/agree.jsonl" ;;
  mechanisms)
    ALL=acag,routing_moh,routing_packed,sink,constraint_a,window,acag_detach,all_on,output_gate,unet_concat
    ALL=$ALL,a2c_temperature,roles,xsa,key_offset,sentinel,agency
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
        --mechanisms routing_moh,routing_packed
    done
    each bench contexts --contexts 1024 4096 16384 --batch_size 1 $TIMES --no-compile
    each bench pruned --heads_off 0 .25 .5 .75 $TIMES ;;
  heads)
    prepared "$DATASET"
    LIFE=(config/life.py --dataset="$DATASET" --n_layer=12 --n_head=12 --n_embd=768 --block_size=1024
          --batch_size=16 --max_iters="${LIFE_STEPS:-600}" --eval_interval=100 --save_interval=50
          --sparsity_warmup=200 --controller_tokens=16384 --controller_heldout=16384
          --controller_interval=50)
    rm -rf "$RUNS/life"
    "$PY" train.py "${LIFE[@]}" --out_dir="$RUNS/life" & RUN=$!
    while [ ! -f "$RUNS/life/ckpt.pt" ] && kill -0 $RUN; do sleep 1; done
    kill -9 $RUN || true
    wait $RUN || true
    each "$PY" train.py "${LIFE[@]}" --out_dir="$RUNS/life" --resume
    cp "$RUNS/life/log.jsonl" "$OUT/life.jsonl"
    cp "$RUNS/life/heads.jsonl" "$OUT/heads.jsonl"
    "$PY" plot_curves.py --heads "$RUNS/life" ;;
  constraints)
    prepared "$DATASET"
    "$PY" data/label.py --dataset="$DATASET" --by=synthetic --show=0
    BIG=${BIG:---n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=16 --max_iters=300}
    "$PY" train.py --recipe=modern --dataset="$DATASET" $BIG --out_dir="$RUNS/plain12" --overwrite
    "$PY" train.py --recipe=modern --dataset="$DATASET" $BIG --mechanism=constraint_a --labels=synthetic \
      --constraint_warmup=50 --out_dir="$RUNS/constraint12" --overwrite
    each "$PY" probe.py constraints score --ckpt "$RUNS/constraint12" --plain "$RUNS/plain12" \
      --labels synthetic --tokens 65536 --fit 50000 --json "$OUT/constraints.json"
    each "$PY" probe.py constraints skip --ckpt "$RUNS/constraint12" --tokens 65536
    each "$PY" probe.py look --ckpt "$RUNS/constraint12" --text README.md --out "$OUT/audit.jsonl" ;;
  finetune)
    prepared "$DATASET"
    BIG=${BIG:---n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=16 --max_iters=400}
    "$PY" train.py --recipe=gpt2 --dataset="$DATASET" $BIG --out_dir="$RUNS/base" --overwrite
    for name in acag plain; do
      flags=(); [ "$name" = acag ] || flags=(--acag=None)
      "$PY" train.py config/finetune_gpt_neo_acag.py --init_from="$RUNS/base" --dataset="$DATASET" \
        --max_iters=100 --out_dir="$RUNS/tuned-$name" --overwrite "${flags[@]}"
    done
    "$PY" train.py config/finetune_gpt2.py --init_from="$RUNS/base" --dataset="$DATASET" --max_iters=150 \
      --out_dir="$RUNS/adaptive" --overwrite
    each "$PY" probe.py fewshot --ckpt "$RUNS/tuned-plain" --ckpt "$RUNS/tuned-acag" --ckpt "$RUNS/base" \
      --shots 0 1 4 8 --json "$OUT/fewshot.json"
    each "$PY" probe.py detectors --ckpt "$RUNS/base" --json "$OUT/detectors.json"
    "$PY" -c "import safetensors" 2>/dev/null || return "$code"
    each "$PY" export_hf.py --ckpt "$RUNS/adaptive" --out "$RUNS/adaptive-hf" --force
    each "$PY" evaluate.py --ckpt "$RUNS/adaptive-hf" --dataset "$DATASET" --split val ;;
  compare)
    prepared enwiki15
    # of an earlier call, where out/ does not stay
    [ ! -f "$OUT/trials.tar" ] || tar xf "$OUT/trials.tar" --skip-old-files
    study compare "$((LIMIT * 4 / 5))" "${STUDY:-config/studies/all.py}" --scale=mid --screen_seeds=101 \
      --seeds=1,2,3 --jobs_per_gpu=2 --budgets=0.7,1.4 \
      --settings="{'dataset': 'enwiki15', 'max_iters': ${COMPARE_STEPS:-300}, 'eval_interval': 100}" || code=1
    tar cf "$OUT/trials.tar" --exclude='*.pt' out/trials ;;
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

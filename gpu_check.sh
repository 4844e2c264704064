#!/usr/bin/env bash
# Everything that needs a CUDA GPU, one part at a time, each under ten minutes:
#   ./gpu_check.sh test         the test suite on a machine with CUDA (torch 2.11 to 2.15)
#   ./gpu_check.sh bench        bench.py at 12 layers, 12 heads, 768 wide, context 1,024, bf16, compiled;
#                               NANOGPT=/path runs nanoGPT beside it
#   ./gpu_check.sh mechanisms   training step of each mechanism against the plain GPT at the same size;
#                               MECHS names others (compiling each takes a while)
#   ./gpu_check.sh long         peak memory at context 16,384; routing packed, dense and plain at 1,024 and
#                               16,384; decoding; pruned heads
#   ./gpu_check.sh compare      a study at the middle scale on enwiki15, COMPARE_STEPS steps; what is done is
#                               kept in out/trials, and in $OUT/study/results.json.gz, which belongs in results/
#   ./gpu_check.sh heads        one life of heads at 12 layers, 12 heads, 768 wide: gates moved, pruned, grown,
#                               killed in the middle and resumed; pictures, and the share of time it takes
#   ./gpu_check.sh constraints  constraint heads on synthetic labels at 12/12/768, beside a plain GPT: their
#                               scores against probes, heads skipped, and an audit page
#   ./gpu_check.sh finetune     a plain GPT of 12/12/768, then ACAG over it on documents, then gates, head states
#                               and late skips; few-shot before and after, detectors, and out as a folder
#   ./gpu_check.sh train        both recipes on the same bytes, same tokens, scored on the whole test split,
#                               with curves
# Results go to $OUT (default out/gpu). STUDY names a study, LIMIT its seconds. PY names the interpreter,
# DATASET a byte dataset (default pystdlib), STEPS and SHAPE the training.
set -euo pipefail
cd "$(dirname "$0")"
PY=${PY:-python3} OUT=${OUT:-out/gpu} DATASET=${DATASET:-pystdlib} STEPS=${STEPS:-1500}
SHAPE=${SHAPE:---n_layer=6 --n_head=6 --n_embd=384 --block_size=512 --batch_size=64 --eval_interval=250}
mkdir -p "$OUT"

# run NAME ARGS...: bench.py, its table in $OUT/NAME.txt and its figures in $OUT/NAME.json
run() { "$PY" bench.py "${@:2}" --json "$OUT/$1.json" 2>&1 | tee "$OUT/$1.txt"; }

case "${1:-}" in
test)
  "$PY" -m pytest -q 2>&1 | tee "$OUT/tests.txt" ;;
bench)
  run bench --rounds 11 ${NANOGPT:+--nanogpt "$NANOGPT"} ;;
mechanisms)
  ALL=routing_moh,sentinel,agency,unet_concat,constraint_a,a2c_temperature,acag_detach,acag,output_gate,xsa,sink
  ALL=$ALL,key_offset,roles,all_on
  run mechanisms --mechanisms "${MECHS:-$ALL}" --rounds 7 --steps 5 ;;
long)
  ONE="--n_layer 2 --n_head 12 --n_embd 768 --batch_size 1" TIMES="--rounds 7 --steps 5"
  ALL=routing_moh,a2c_key_bias,constraint_a,acag_detach,acag,window,output_gate_elementwise,sink,all_on
  run memory --what memory $ONE --block_size 16384 --mechanisms "${MECHS:-$ALL}"
  for context in 1024 16384; do
    run routing-$context --what train $ONE --block_size $context $TIMES \
      --mechanisms routing_moh,routing_packed
  done
  run decode --contexts 1024 4096 16384 --batch_size 1 $TIMES --no-compile
  run pruned --heads_off 0 .25 .5 .75 $TIMES ;;
compare)
  [ -f data/enwiki15/meta.json ] || "$PY" data/enwiki15/prepare.py
  # of an earlier call, where out/ does not stay
  [ ! -f "$OUT/trials.tar" ] || tar xf "$OUT/trials.tar" --skip-old-files
  ARGS=("${STUDY:-config/studies/all.py}" --scale=mid --screen_seeds=101 --seeds=1,2,3 --jobs="${JOBS:-2}"
        --budgets=0.7,1.4 --settings="{'dataset': 'enwiki15', 'max_iters': ${COMPARE_STEPS:-300},
                                       'eval_interval': 100}")
  timeout --signal=INT "${LIMIT:-540}" "$PY" compare.py "${ARGS[@]}" --out_dir="$OUT/study" 2>&1 |
    tee "$OUT/compare.txt" || true
  "$PY" compare.py "${ARGS[@]}" --out_dir="$OUT/study" --report_only
  tar cf "$OUT/trials.tar" --exclude='*.pt' out/trials ;;
heads)
  [ -f "data/$DATASET/meta.json" ] || "$PY" "data/$DATASET/prepare.py"
  LIFE=(config/life.py --dataset="$DATASET" --n_layer=12 --n_head=12 --n_embd=768 --block_size=1024
        --batch_size=16 --max_iters="${LIFE_STEPS:-600}" --eval_interval=100 --save_interval=50
        --sparsity_warmup=200 --controller_tokens=16384 --controller_heldout=16384 --controller_interval=50)
  rm -rf "$OUT/life"
  "$PY" train.py "${LIFE[@]}" --out_dir="$OUT/life" & RUN=$!
  while [ ! -f "$OUT/life/ckpt.pt" ] && kill -0 $RUN; do sleep 1; done
  kill -9 $RUN || true
  wait $RUN || true
  "$PY" train.py "${LIFE[@]}" --out_dir="$OUT/life" --resume 2>&1 | tee "$OUT/life.txt"
  "$PY" plot_curves.py --heads "$OUT/life" ;;
constraints)
  [ -f "data/$DATASET/meta.json" ] || "$PY" "data/$DATASET/prepare.py"
  "$PY" data/label.py --dataset="$DATASET" --by=synthetic --show=0
  BIG=${BIG:---n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=16 --max_iters=300}
  "$PY" train.py --recipe=modern --dataset="$DATASET" $BIG --out_dir="$OUT/plain12" --overwrite
  "$PY" train.py --recipe=modern --dataset="$DATASET" $BIG --mechanism=constraint_a --labels=synthetic \
    --constraint_warmup=50 --out_dir="$OUT/constraint12" --overwrite
  "$PY" constraints.py score --ckpt "$OUT/constraint12" --plain "$OUT/plain12" --labels synthetic \
    --tokens 65536 --fit 50000 --json "$OUT/constraints.json" 2>&1 | tee "$OUT/constraints.txt"
  "$PY" constraints.py skip --ckpt "$OUT/constraint12" --tokens 65536 2>&1 | tee -a "$OUT/constraints.txt"
  "$PY" evaluate.py --audit --ckpt "$OUT/constraint12" --text README.md --out "$OUT/audit.jsonl" ;;
finetune)
  [ -f "data/$DATASET/meta.json" ] || "$PY" "data/$DATASET/prepare.py"
  BIG=${BIG:---n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=16 --max_iters=400}
  "$PY" train.py --recipe=gpt2 --dataset="$DATASET" $BIG --out_dir="$OUT/base" --overwrite
  for name in acag plain; do
    flags=(); [ "$name" = acag ] || flags=(--acag=None)
    "$PY" train.py config/finetune_gpt_neo_acag.py --init_from="$OUT/base" --dataset="$DATASET" \
      --max_iters=100 --out_dir="$OUT/tuned-$name" --overwrite "${flags[@]}"
  done
  "$PY" train.py config/finetune_gpt2.py --init_from="$OUT/base" --dataset="$DATASET" --max_iters=150 \
    --out_dir="$OUT/adaptive" --overwrite
  "$PY" probe.py fewshot --ckpt "$OUT/tuned-plain" --ckpt "$OUT/tuned-acag" --ckpt "$OUT/base" \
    --shots 0 1 4 8 --json "$OUT/fewshot.json" 2>&1 | tee "$OUT/fewshot.txt"
  "$PY" probe.py detectors --ckpt "$OUT/base" --picture "$OUT/detectors.png" --json "$OUT/detectors.json" \
    2>&1 | tee "$OUT/detectors.txt"
  "$PY" -c "import safetensors" 2>/dev/null || exit 0
  "$PY" export_hf.py --ckpt "$OUT/adaptive" --out "$OUT/adaptive-hf" --force
  "$PY" evaluate.py --ckpt "$OUT/adaptive-hf" --dataset "$DATASET" --split val ;;
train)
  [ -f "data/$DATASET/meta.json" ] || "$PY" "data/$DATASET/prepare.py"
  for recipe in gpt2 modern; do
    "$PY" train.py --dataset="$DATASET" $SHAPE --max_iters="$STEPS" --recipe="$recipe" \
      --out_dir="$OUT/$recipe" --overwrite
  done
  "$PY" evaluate.py --ckpt "$OUT/gpt2" --ckpt "$OUT/modern" --json "$OUT/scores.json"
  "$PY" plot_curves.py "$OUT/gpt2" "$OUT/modern" --out "$OUT" ;;
*)
  sed -n '2,23s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

"""
Does training still compute what it did, in the corners that a plain run does not reach?

    python data/pystdlib/prepare.py
    python tests/more_numbers.py                    # against results/more_numbers.json, about 3 minutes
    python tests/more_numbers.py bfloat16 resumed   # those alone
    python tests/more_numbers.py --write            # make the file anew

Every entry is one or more command lines that run one after the other in a folder of their own. What is
compared is what the last of them logged: the loss of each step, and the validation loss after the last. The
first eight steps must agree to 2e-4, the rest to 2e-3, since CPUs differ in the last bits and steps multiply
that.

The runs cover bfloat16, alone and with the batch in portions; two ranks over gloo; a run that was stopped at
step 6 and resumed; labels of constraint heads; a teacher; a trunk that is frozen and thawed; documents; heads
that are pruned and grown, after which the optimizers are made anew; and float16 with a step that overflows,
where every optimizer must leave out the update, or none.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results/more_numbers.json"
COMMON = ("--scale=tiny --dataset=pystdlib --max_iters=12 --lr_decay_iters=12 --eval_interval=12 "
          "--log_interval=1 --eval_tokens=8192 --device=cpu").split()
TRAIN = ["train.py", *COMMON]
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *TRAIN]
LABELS = ["-m", "lab.label", "--dataset=pystdlib", "--by=synthetic", "--splits", "train", "val", "--out",
          "{folder}/labels"]
HEADS = "--constraint_names=['reciprocity','decidability']"

# {name: command lines, the last of which is compared}; {folder} is the entry's own
RUNS = {
    "bfloat16": [[*TRAIN, "--dtype=bfloat16"]],
    "bfloat16_accumulated": [[*TRAIN, "--dtype=bfloat16", "--grad_accum=2"]],
    "float16": [[*TRAIN, "--dtype=float16"]],
    "float16_overflow": [[*TRAIN, "--dtype=float16", "--batch_size=2", "--block_size=2"]],  # in step 3
    "two_ranks": [TWO_RANKS],
    "two_ranks_accumulated_routing": [[*TWO_RANKS, "--grad_accum=2", "--mechanism=routing_moh"]],
    "resumed": [[*TRAIN, "--max_iters=6", "--eval_interval=6", "--out_dir={folder}/run"],
                [*TRAIN, "--resume", "--eval_interval=6", "--out_dir={folder}/run"]],
    "resumed_controller": [[*TRAIN, "--mechanism=sentinel,agency", "--controller=rules", "--policy=True",
                            "--controller_interval=2", "--controller_warmup=1", *extra,
                            "--out_dir={folder}/run"]
                           for extra in (["--max_iters=6"], ["--resume"])],
    "labels": [LABELS, [*TRAIN, HEADS, "--labels={folder}/labels", "--constraint_coef=0.3"]],
    "labels_accumulated": [LABELS, [*TRAIN, HEADS, "--labels={folder}/labels", "--constraint_coef=0.3",
                                    "--grad_accum=2"]],
    "teacher": [[*TRAIN, HEADS, "--out_dir={folder}/teacher"],
                [*TRAIN, HEADS, "--constraint_match=kl", "--teacher={folder}/teacher", "--grad_accum=2"]],
    "frozen": [[*TRAIN, "--out_dir={folder}/plain"],
               [*TRAIN, "--init_from={folder}/plain", "--mechanism=acag", "--freeze_trunk", "--thaw_from=8",
                "--mechanism_lr=0.3"]],
    "documents": [[*TRAIN, "--documents=16"]],
    "documents_accumulated": [[*TRAIN, "--documents=16", "--grad_accum=2"]],
    "pruned": [[*TRAIN, "--mechanism=sentinel", "--controller=rules", "--controller_interval=3",
                "--controller_warmup=1", "--controller_patience=1", "--prune_gate=0.999", "--prune_floor=2",
                "--prune_margin=1"]],
    "grown": [[*TRAIN, "--grow_from=2", "--grow_heads=1", "--controller_interval=2", "--controller_warmup=1",
               "--controller_patience=1", "--grow_delta=9", "--grow_ramp=4"]],
}


def run(lines):
    """[the loss of each step ..., the validation loss] of the last command line, or [the error of one]."""
    with tempfile.TemporaryDirectory() as folder:
        for words in lines:
            words = [word.replace("{folder}", folder) for word in words]
            if not any(word.startswith("--out") for word in words):
                words.append(f"--out_dir={folder}/run")
            done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True,
                                  env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode:
                return [f"{' '.join(words)}: {(done.stderr or done.stdout).strip().splitlines()[-1]}"]
        rows = [json.loads(line) for line in Path(folder, "run/log.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    evaluated = [row["val_loss"] for row in rows if "val_loss" in row]
    return [losses[step] for step in sorted(losses)] + evaluated[-1:]


def difference(now, then):
    """In words, how one run differs from what is on file; None: it does not."""
    if len(now) != len(then) or any(isinstance(value, str) for value in now):
        return f"{now[-1]} where {then[-1]} was"
    for at, (a, b) in enumerate(zip(now, then)):
        if abs(a - b) > (2e-4 if at < 8 else 2e-3):
            return f"value {at + 1} of {len(then)} is {a:.6f} where {b:.6f} was"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="entries, all where none is named")
    parser.add_argument("--write", action="store_true", help="write the file anew")
    args = parser.parse_args()
    then = json.loads(FILE.read_text()) if FILE.is_file() else {}
    names, differing = args.names or list(RUNS), 0
    for name in names:
        now = run(RUNS[name])
        if args.write:
            then[name] = now
            print(f"{name}: {now[0] if len(now) == 1 else now[-1]}", flush=True)
        elif why := difference(now, then[name]):
            differing += 1
            print(f"{name}: {why}", flush=True)
    if args.write:
        FILE.write_text(json.dumps(then, indent=0) + "\n")
    else:
        print(f"{len(names) - differing} of {len(names)} runs compute what they did")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()

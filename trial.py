"""
One run of a comparison: train what a folder's trial.json says, score it, write result.json.

    python trial.py out/trials/0123456789abcdef     # compare.py starts these; started again, it goes on where it stopped

trial.json: {"model": {flags}, "train": {flags}, "score": {"split", "tokens"}}, where tokens 0 means the whole split, and
"code", "data", "torch": what else the numbers depend on. Beside a run's usual files the folder gets
nats.npy (float64, nats of each scored window, in order) and, last, result.json: what has that is done.
"""

import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

import checkpoint
import train
from common import UserError, explain, pick_device, write_atomic
from dataset import Dataset
from evaluate import bits, score, windows_of
from model import GPTConfig


def run(folder):
    """Train (or go on), score, measure; returns what it wrote into result.json."""
    folder = Path(folder)
    if (folder / "result.json").is_file():
        return json.loads((folder / "result.json").read_text())
    spec, libraries = json.loads((folder / "trial.json").read_text()), peak_memory()
    last = train.train(GPTConfig(**spec["model"]), train.TrainConfig(**spec["train"], out_dir=str(folder), resume=True))
    memory = None if libraries is None else peak_memory() - libraries

    state = checkpoint.read(folder)  # best.pt: the lowest validation loss
    model = checkpoint.build(state, folder, pick_device(spec["train"].get("device", "auto")))
    data, split, T = Dataset(spec["train"]["dataset"]), spec["score"]["split"], model.config.block_size
    nats = score(model, data, split, max_tokens=spec["score"]["tokens"], per_token=True).astype(np.float64)
    if not np.isfinite(nats).all():
        raise UserError(f"the trained model gives {nats.sum()} nats on {split}: its training diverged")
    cuts = windows_of(data, split, T, max_tokens=spec["score"]["tokens"])
    size = data.splits[split]["bytes"]
    if nats.size < data.splits[split]["tokens"]:  # a slice, whose tokens may be longer or shorter than the others
        tokens = data.tokens(split)
        size = sum(len(data.tokenizer.decode_bytes(tokens[start:end].tolist())) for start, end, _ in cuts)
    per_window = np.add.reduceat(nats, np.cumsum([0] + [scored for _, _, scored in cuts[:-1]]))
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    result = dict(nats=float(nats.sum()), tokens=int(nats.size), bytes=size, bpb=bits(float(nats.sum()), size),
                  params=model.num_params(), flops_per_token=model.flops_per_token(), best_step=state["step"], steps=last["step"],
                  seconds=last["elapsed_s"], tokens_per_s=statistics.median(r["tokens_per_s"] for r in rows if "tokens_per_s" in r),
                  memory_mib=memory, threads=torch.get_num_threads())
    write_atomic(folder / "nats.npy", lambda f: np.save(f, per_window))
    write_atomic(folder / "result.json", lambda f: f.write(json.dumps(result, indent=1).encode()))
    (folder / "ckpt.pt").unlink(missing_ok=True)  # the optimizer's moments: three times the weights, and nothing goes on from them
    return result


def peak_memory():
    """Peak memory of this process so far in MiB: allocated on the GPU, else resident; None where not known."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource  # not on every system
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main(argv=None):
    folders = sys.argv[1:] if argv is None else argv
    if len(folders) != 1 or not Path(folders[0], "trial.json").is_file():
        sys.exit("trial: give one folder that holds a trial.json; compare.py makes them")
    try:
        run(folders[0])
    except (Exception, KeyboardInterrupt) as e:
        problem = explain(e)
        if problem is None:
            raise
        sys.exit(f"trial: {problem}")


if __name__ == "__main__":
    main()

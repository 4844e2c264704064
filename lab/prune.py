"""
Remove heads from trained models, by several criteria, and measure what it costs and how much faster it is.

    python -m lab.prune --ckpt out/a --to 0.5 --by importance_rescored --out_dir out/half   # out/half/best.pt
    python -m lab.prune --ckpt out/a --to 1 0.5 --by importance --out_dir out/b --recover 200
    python -m lab.prune --ckpt out/a --ckpt out/b --to 0.75 0.5 0.25 --by all --json out/pruning.json

--to is the share of a checkpoint's heads to keep, to the nearest head; each layer keeps --floor. Of each
criterion the head with the lowest score goes first, constraint heads never. Criteria read --text tokens of
the training split.

random               drawn by --seed, another draw for each checkpoint
gate                 the head's gate that depends on no token: sentinel, agency
entropy              of its attention rows over the log of their length; here the highest goes first
importance           |y . dL/dy| a sequence (Michel et al., arXiv 1905.10650, eq. 2), no norm over layers
importance_rescored  the same, measured again after every removal
blocks               the control, for which --floor does not count: whole blocks are removed, each time the
                     one whose absence costs least, as long as that saves no more FLOPs than removing heads

--by all leaves out what a model has nothing for. The table has, of each criterion and share, the score before
and after (means over checkpoints, and in brackets the range), the speed of decoding one text with a cache, in
turns with the whole model, whose speed is 1, and MiB of weights, buffers and the cache of one full context;
"ratio" is to the whole model. Of checkpoints of a task it reads and scores rows: what share of the answers is
right, and nats an answer.

Without --out_dir no model is kept. With it, one checkpoint, criterion and share writes best.pt there. Several
have a folder <criterion>-<share> each, and several checkpoints one above it, <number>-<run>. --recover trains
on, on batches in another order, at rates that fall in a straight line from 0.3 of the run's peaks to 0, and
without a controller; pruned.pt is what it started from. Longer training helps the whole model too: --to 1
shows how much.

prune.json in out_dir has the rows that are done, or the file of --json where there is no out_dir. The same
command, after it was stopped or killed, goes on with them, and does what was half done anew.
"""

import argparse
import copy
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from statistics import mean

if __name__ == "__main__" and not __package__:  # as a script it finds lab/ alone, none of its imports
    command = shlex.join(["python", "-m", "lab.prune", *sys.argv[1:]])
    sys.exit(f"prune: type, in the repository's folder: {command}")

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly

import numpy as np
import torch

from model import GPT
from nanoheads import checkpoint, own_mechanism
from nanoheads.common import (ROOT, UserError, as_program, json_safe, pick_device, plural, say, table,
                              writable, writable_folder, write_atomic, write_json)
from nanoheads.config import TrainConfig, trained_with
from nanoheads.configurator import likely_name, read_file
from nanoheads.drawing import COLOURS, label_right, panels, picture_bytes
from nanoheads.files import only_writer, sha256
from nanoheads.log import read_json
from nanoheads.optim import PEAK_RATES
from nanoheads.pruning import constant_gate, joined_by, pack, prune_heads
from nanoheads.scoring import load, score_windows
from nanoheads.tasks import TaskData, rows_per_level, score_levels, summary
from nanoheads.timing import progress_bar, take_turns, time_rows
from lab.heads.config import ControllerConfig
from lab.heads.measuring import (attentions, cache_bytes, closed, constant_gates, fixed_text, measure,
                                 nats_on)

LARGEST = 2**63 - 1  # the largest seed, and no count is larger
RECOVER_FROM = 0.3   # of the peak learning rates
# flags of mechanisms whose part differs from block to block, so that no block can be taken out
DIFFER_BY_BLOCK = ("value_residual", "value_embedding", "diff_v1", "stream_scalars", "depth_attention",
                   "mudd")
DECODED = 256        # tokens that a timed text has at most


# ---- scores: (model, x, y, seed) -> [a score of each head] of each block; constraint heads last ----

def random(model, x, y, seed):
    rng = np.random.default_rng(seed)
    return [rng.random(attn.n_head) for attn in attentions(model)]


def gate(model, x, y, seed):
    return constant_gates(model)


def entropy(model, x, y, seed):
    return [-block_entropy for block_entropy in measure(model, x, y)["entropy"]]


def importance(model, x, y, seed):
    return measure(model, x, y)["importance"]


SCORES = {"random": random, "gate": gate, "entropy": entropy, "importance": importance}
CRITERIA = (*SCORES, "importance_rescored", "blocks")  # --by: scores, one of them taken again, and a control


# ---- what goes ----

def removal_order(model, score, n, floor, x, y, seed, rescore=False):
    """[(layer, head)] of the n heads to remove, in that order, by their original numbers.

    score: one of SCORES; it is taken once, or (rescored) again after every removal. Heads of a group or pair
    go together, by their mean score; n is a number of whole groups.
    """
    gone, n_left, scores, group = [], [attn.n_head for attn in attentions(model)], {}, model.config.unit
    while len(gone) < n:
        if not scores or rescore:
            with closed(model, gone):
                block_scores = SCORES[score](model, x, y, seed)
            scores = {(layer, attn.head_ids[i]): mean(block_scores[layer][i:i + group].tolist())
                      for layer, attn in enumerate(attentions(model)) for i in range(0, attn.n_head, group)}
        may_go = [head for head in scores if head not in gone and n_left[head[0]] - group >= floor]
        layer, first = min(may_go, key=scores.get)
        gone += [(layer, first + i) for i in range(group)]
        n_left[layer] -= group
    return gone


def without_heads(model, gone):
    """A copy of the model without these (layer, head)."""
    smaller = copy.deepcopy(model)
    prune_heads(smaller, {layer: [head for block, head in gone if block == layer] for layer, _ in gone})
    return smaller


def without_blocks(model, gone):
    """A copy of the model without these blocks; those behind them move up. Not for U-Net skips."""
    c, wte = model.config, model.transformer.wte.weight
    blocks_left = [i for i in range(c.n_layer) if i not in gone]
    extra = [number for number, i in enumerate(blocks_left) if attentions(model)[i].n_extra]
    config = replace(c, n_layer=len(blocks_left),
                     head_ids=c.head_ids and [c.head_ids[i] for i in blocks_left],
                     constraint_layers=extra if c.constraint_names else None)
    smaller = GPT(config).to(wte.device, wte.dtype).eval()
    blocks = torch.nn.ModuleList(model.transformer.h[i] for i in blocks_left)
    other_weights = {name: t for name, t in model.state_dict().items()
                     if not name.startswith("transformer.h.")}
    smaller.load_state_dict({**other_weights, **blocks.state_dict(prefix="transformer.h.")})
    return smaller


def blocks_to_drop(model, flops_saved, x, y):
    """[block]: as many as save at most so many FLOPs a token, each time what costs least in loss.

    Blocks with constraint heads stay, and one block in any case.
    """
    gone, whole = [], model.flops_per_token()
    while len(gone) < model.config.n_layer - 1:
        costs = {}
        for i, attn in enumerate(attentions(model)):
            if i not in gone and not attn.n_extra:
                smaller = without_blocks(model, [*gone, i])
                if whole - smaller.flops_per_token() <= flops_saved:
                    costs[i] = nats_on(smaller, x, y)
        if not costs:
            break
        gone.append(min(costs, key=costs.get))
    return gone


# ---- what it costs and brings ----

def memory_bytes(model):
    """Bytes of weights and buffers, and of the cache of one full context."""
    return cache_bytes(model) + sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def decoding_figures(model, smaller, args):
    """{figure: value} of memory and cached decoding, both models packed and in turns; speed: whole = 1."""
    models = dict(whole=pack(model), pruned=pack(smaller))
    figures = dict(bytes=memory_bytes(models["pruned"]), bytes_before=memory_bytes(models["whole"]))
    if args.rounds:
        n = min(model.config.block_size - 1, DECODED)
        idx = torch.zeros(1, 1, dtype=torch.long, device=args.device)
        seconds = take_turns(models, lambda name: models[name].generate(idx, n), args, "decoding")
        _, row = time_rows("decode", seconds, "whole", n, n)
        figures.update(tokens_per_s=row["tokens_per_s"], speed=1 / row["time_ratio"],
                       speed_low=1 / row["time_ratio_high"], speed_high=1 / row["time_ratio_low"])
    return figures


def save(path, state, model, row):
    """Write a pruned model as a checkpoint: what was read, less what belongs to the whole model."""
    content = {key: state[key] for key in ("meta", "dataset", "train", "step") if key in state}
    with only_writer(path.parent):
        own_mechanism.keep(model.config, path.parent)
        if records := own_mechanism.record(model.config):
            content["own_mechanism"] = records
        checkpoint.save(path, dict(content, model=model.state_dict(), config=model.config.flags(),
                                   pruned=row))


def recovery(path, state, model, data, args):
    """{key: value}, where it is not the default, of training on from a pruned checkpoint into its folder."""
    dynamic = {f.name for f in fields(ControllerConfig)}
    config = trained_with({key: value for key, value in state["train"].items() if key not in dynamic}, path)
    config = config.for_recipe(model.config.recipe)
    rates = {key: RECOVER_FROM * getattr(config, key) for key in PEAK_RATES if getattr(config, key)}
    launch = dict(resume=False, overwrite=False, eval_only=False, init_anyway=False, wandb_log=False,
                  patience=None, profile=None)
    if config.thaw_from and config.thaw_from >= args.recover:  # the trunk stays frozen to the end
        launch["thaw_from"] = None
    text = {} if config.task else dict(dataset=str(data.dir))
    config = replace(config, **rates, **launch, **text, out_dir=str(path.parent), init_from=str(path),
                     device=args.device, max_iters=args.recover, lr_decay_iters=None,
                     min_lr=0.0, schedule="trapezoid", decay_frac=1.0, warmup_iters=0,
                     eval_interval=max(1, args.recover // 4), save_interval=args.recover)
    defaults = asdict(TrainConfig())
    values = {key: value for key, value in asdict(config).items()
              if (config.task or value != defaults[key]) and key != "own_mechanism"}
    if config.task:  # all keys, above too, but those of a text: what is left out its scale would set
        values = {key: value for key, value in values.items() if key not in ("dataset", "eval_tokens")}
        model_flags = model.config.flags()
        task_keys = read_file(str(ROOT / "config/task.py"))
        values.update((key, model_flags[key]) for key in task_keys if key in model_flags)
    c = model.config  # the checkpoint brings its flags, but for those that a new run sets
    return dict(values, seed=c.seed + 1, dropout=c.dropout, attn_dropout=c.attn_dropout,
                checkpoint_activations=c.checkpoint_activations)


def run_training(values, files):
    """Run train.py with these values, its lines on stderr. UserError, in one line, where it fails.

    files: of mechanisms of one's own that may run, as they may here.
    """
    command = [sys.executable, str(ROOT / "train.py"), *(f"--{key}={value}" for key, value in values.items())]
    command += [f"--own_mechanism={','.join(files)}"] if files else []
    # stdout holds the table alone, so that what train.py prints goes to file descriptor 2
    process = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    problems = [line.removeprefix("train: ") for line in process.stderr.splitlines()
                if line.startswith("train: ")]
    if not process.returncode or not problems:
        print(process.stderr, end="", file=sys.stderr)
    if process.returncode:
        raise UserError(f"--recover: {'; '.join(problems) or f'train.py ended with {process.returncode}'}")


def train_recovered(path, state, model, data, args):
    """Train on from a pruned checkpoint into its folder; the model of the lowest validation loss."""
    for name in ("ckpt.pt", "best.pt"):  # of a command that was killed here
        path.with_name(name).unlink(missing_ok=True)
    files = [str(own_mechanism.copy(file, path.parent)) for file in own_mechanism.files_for(model.config)]
    run_training(recovery(path, state, model, data, args), files)
    return checkpoint.build(checkpoint.read(path.parent), path.parent, args.device)


def scores(model, data, args):
    """What a model scores, as a dict: bpb, bits per byte of a text; of a task right and nats of summary()."""
    if not isinstance(data, TaskData):
        return dict(bpb=score_windows(model, data, args.split, args.tokens)[1]["bpb"])
    result = summary(score_levels(model, data, args.split, rows_per_level(data, args.tokens)))
    return dict(right=result["right"], nats=result["nats"])


def heads_kept(to, heads, unit):
    """The share `to` of so many heads, to the nearest group of `unit` heads, which stay or go together."""
    return round(to * heads / unit) * unit


def rows_of(args, number):
    """Yield a row for each criterion and share of one checkpoint that args.done has none of; of blocks, where
    one is cheap enough.
    """
    state, model, data = args.loaded[number]
    x, y = (t.to(args.device) for t in fixed_text(data, "train", model.config.block_size, args.text))
    heads, whole_flops = sum(attn.n_head for attn in attentions(model)), model.flops_per_token()
    n_removed = {to: heads - heads_kept(to, heads, model.config.unit) for to in args.to}

    def score_model(scored_model):
        return scores(scored_model, data, args)

    scores_before = {f"{key}_before": value for key, value in score_model(model).items()}
    done = {(row["ckpt"], row["by"], row["to"]) for row in args.done}
    for criterion in progress_bar(args.by, f"checkpoint {number + 1}"):
        shares = [to for to in args.to if (args.ckpt[number], criterion, to) not in done]
        if not shares:
            continue
        # blocks: they save no more FLOPs than heads at random
        score = {"importance_rescored": "importance", "blocks": "random"}.get(criterion, criterion)
        order = removal_order(model, score, max(n_removed.values()), args.floor, x, y, args.seed + number,
                              rescore=criterion == "importance_rescored")
        for to in shares:
            gone, blocks = order[:n_removed[to]], []
            smaller = without_heads(model, gone)
            if criterion == "blocks":
                gone, blocks = [], blocks_to_drop(model, whole_flops - smaller.flops_per_token(), x, y)
                if not blocks:
                    continue
                smaller = without_blocks(model, blocks)
            n_kept = sum(attn.n_head for attn in attentions(smaller))
            row = dict(ckpt=args.ckpt[number], by=criterion, to=to, heads=heads, kept=n_kept, gone=gone,
                       blocks=smaller.config.n_layer, blocks_gone=blocks,
                       **scores_before, **score_model(smaller),
                       params_before=model.num_params(), params=smaller.num_params(),
                       flops_before=whole_flops, flops=smaller.flops_per_token(),
                       **decoding_figures(model, smaller, args))
            if args.out_dir:
                folder = args.folders[number, criterion, to]
                save(folder / ("pruned.pt" if args.recover else "best.pt"), state, smaller, dict(row))
                row["folder"] = str(folder)
            if args.recover:
                scores_after = score_model(train_recovered(folder / "pruned.pt", state, smaller, data, args))
                row.update((f"{key}_recovered", value) for key, value in scores_after.items())
            yield row


# ---- output ----

def groups(rows):
    """{(criterion, share): [its row of each checkpoint]}, in the order of the rows."""
    groups_of = {}
    for row in rows:
        groups_of.setdefault((row["by"], row["to"]), []).append(row)
    return groups_of


def result_table(rows):
    """A line for each criterion and share: means over checkpoints, of scores also the range."""
    def cell(key, digits=4, unit=1.0, over=None, span=False):
        values = [row[key] / (row[over] if over else unit) for row in group if key in row]
        text = f" [{min(values):.4f}, {max(values):.4f}]" if span and len(values) > 1 else ""
        return f"{mean(values):,.{digits}f}{text}" if values else "-"

    lines = []
    for (criterion, _), group in groups(rows).items():
        first_row = group[0]
        size = plural(first_row["blocks"], "block") if criterion == "blocks" \
            else plural(first_row["kept"], "head")
        score_cells = [cell(f"{key}{end}", span=bool(end != "_before")) for key in ("bpb", "right", "nats")
                       for end in ("_before", "", "_recovered")]
        lines.append((criterion, size, *score_cells, cell("tokens_per_s", 0), cell("speed", 2),
                      cell("bytes", 2, 2**20), cell("bytes", 2, over="bytes_before"),
                      cell("params", 0), cell("flops", 2, 1e6), cell("flops", 2, over="flops_before")))
    head = ("criterion", "kept", "bits/byte", "pruned", "recovered", "right", "pruned", "recovered",
            "nats/answer", "pruned", "recovered", "tokens/s", "speed", "MiB", "ratio",
            "parameters", "MFLOPs/token", "ratio")
    columns = [column for column in zip(head, *lines) if set(column[1:]) != {"-"}]
    first, *rest = zip(*columns)
    return table(first, rest)


def draw_curves(rows):
    """A Figure: bits per byte, or of a task the share of answers that are right, against heads kept, by
    criterion, mean and range; None: one share alone.

    Models that were trained on stand beside, where there are any.
    """
    shares = sorted({100 * row["to"] for row in rows})
    if len(shares) == 1:
        return None
    groups_of = groups(rows)
    names = [criterion for criterion in CRITERIA if any(row["by"] == criterion for row in rows)]
    colours = dict(zip(CRITERIA, ("0.45", *COLOURS)))
    score, words = ("right", "answers right") if "right" in rows[0] else ("bpb", "bits/byte")
    titles = {key: title for key, title in ((score, "pruned"),
                                            (f"{score}_recovered", "pruned, then trained on"))
              if all(key in row for row in rows)}
    whole = mean(row[f"{score}_before"] for row in rows)
    figure, axes = panels(1.2 + 5.6 * len(titles), 5, len(titles))
    axes = np.atleast_1d(axes)
    for ax, (key, title) in zip(axes, titles.items()):
        ends, reach = [], 0.2 * min(np.diff(shares))  # how far points are moved apart
        asides = np.linspace(reach, -reach, len(names)) if len(names) > 1 else np.zeros(1)
        for criterion, aside in zip(names, asides):
            points = [(100 * to, [row[key] for row in group]) for (b, to), group in groups_of.items()
                      if b == criterion]
            x, y = [x + aside for x, _ in points], [mean(scores) for _, scores in points]
            low, high = zip(*((min(scores), max(scores)) for _, scores in points))
            ax.vlines(x, low, high, color=colours[criterion], linewidth=1)
            dash = "--" if criterion in ("random", "blocks") else "-"
            ax.plot(x, y, "o" + dash, color=colours[criterion], markersize=4, linewidth=1.5)
            ends.append((y[-1], criterion, colours[criterion]))
        ax.axhline(whole, color="black", linewidth=1)
        ax.set(title=title, xlabel="heads kept, %" + ", or of equal FLOPs (blocks)" * ("blocks" in names),
               xlim=(shares[-1] + reach + 3, shares[0] - reach - 3))
        ax.set_xticks(shares, [f"{share:g}" for share in shares])
    label_right(axes[-1], ends)  # the curves of the panels beside it have the same colours
    axes[0].set_ylabel(f"{words}, mean and range; black: the whole model")
    return figure


# ---- command line ----

def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", action="append", required=True,
                   help="a checkpoint or a run folder (its best.pt); may be repeated, for seeds")
    p.add_argument("--to", type=float, nargs="+", required=True, help="share of the heads to keep")
    p.add_argument("--by", nargs="+", required=True, help="criteria, as above, or all")
    p.add_argument("--out_dir", help="where the pruned checkpoints go (default: they are not kept)")
    p.add_argument("--recover", type=int, default=0, metavar="STEPS", help="train on for so many steps")
    p.add_argument("--floor", type=int, default=1, help="heads that each layer keeps (default: 1)")
    p.add_argument("--seed", type=int, default=1337, help="of random (default: 1337)")
    p.add_argument("--split", default="val", help="train, val or test (default: val)")
    p.add_argument("--tokens", type=int, default=131072, help="to score, 0: all (default: 131072)")
    p.add_argument("--text", type=int, default=16384, help="tokens that criteria read (default: 16384)")
    p.add_argument("--rounds", type=int, default=7, help="of timed decoding (default: 7); 0: none")
    p.add_argument("--dataset", help="read this dataset (default: the one trained on)")
    p.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    p.add_argument("--json", help="write the rows to this file; several shares: pruning.png beside it")
    own_mechanism.add_arguments(p)
    return p.parse_args(argv)


def why_unfit(criterion, model):
    """Why a criterion means nothing for a model; None: it does."""
    joined = next(filter(None, map(joined_by, attentions(model))), None)
    if criterion != "blocks" and joined:
        return f"has {joined}, whose heads depend on one another (per_head = None): none can be pruned"
    if criterion == "gate" and any(constant_gate(attn) is None for attn in attentions(model)):
        return "has no gates: it was trained without sentinel and agency"
    if criterion == "blocks" and model.config.unet:
        return "has U-Net skips, which join blocks in pairs"
    keys = "window_layers", "constraint_loss_layers"
    numbering_keys = [key for key in keys if getattr(model.config, key)]
    if criterion == "blocks" and numbering_keys:
        return f"has {', '.join(numbering_keys)}, which names blocks by their numbers"
    uneven = [cls.flag for cls in model.config.mechanisms() if cls.flag in DIFFER_BY_BLOCK]
    if criterion == "blocks" and uneven:
        return f"has {', '.join(uneven)}, for which blocks are not of one kind"


def check_model(args, path, state, model):
    """Raise UserError where a checkpoint does not go with the arguments."""
    sizes, unit = [attn.n_head for attn in attentions(model)], model.config.unit
    n_kept = heads_kept(min(args.to), sum(sizes), unit)
    n_least = sum(-(-min(args.floor, n) // unit) * unit for n in sizes)
    if args.floor > model.config.n_head:
        raise UserError(f"--floor {args.floor} is above {path}'s n_head={model.config.n_head}")
    if n_kept < n_least:
        raise UserError(f"--to {min(args.to):g} keeps {n_kept} of {path}'s {sum(sizes)} heads, "
                        f"and --floor {args.floor} keeps {n_least}")
    if args.recover and not state.get("train"):
        raise UserError(f"{path} does not say how it was trained, which --recover goes on with")
    for criterion in args.by:
        if criterion != "all" and (reason := why_unfit(criterion, model)):
            raise UserError(f"--by {criterion}: {path} {reason}")


def results_of(args):
    """What a command asks for and of which data, as its results say."""
    options = ("split", "tokens", "text", "floor", "seed", "recover", "rounds", "device", "ckpt", "by", "to")
    _, _, data = args.loaded[0]
    of_task = isinstance(data, TaskData)
    files = [checkpoint.file_of(path) for path in args.ckpt]
    return dict(dataset=data.meta["name"],
                split_sha256=None if of_task else data.splits[args.split].get("sha256"),
                ckpt_sha256=[sha256(file) if file.is_file() else None for file in files],
                torch=torch.__version__, **{name: vars(args)[name] for name in options})


def rows_done(args):
    """The rows that the same command had when it ended before all were done; None: it did not."""
    known = read_json(args.progress) or {} if args.progress and args.progress.is_file() else {}
    rows, finished = known.pop("rows", None), known.pop("finished", None)
    return rows if finished is False and known == json_safe(args.results) else None


def folders(args):
    """{(number of the checkpoint, criterion, share): folder}. UserError where one holds a run already."""
    folder_of = {}
    if not args.out_dir:
        return folder_of
    writable_folder(args.out_dir, "--out_dir")
    for (number, path), criterion, to in product(enumerate(args.ckpt, 1), args.by, args.to):
        run = Path(path) if Path(path).is_dir() else Path(path).parent
        names = [f"{number}-{run.resolve().name}"] if len(args.ckpt) > 1 else []
        names += [f"{criterion}-{to:g}"] if len(args.by) * len(args.to) > 1 else []
        folder = folder_of[number - 1, criterion, to] = Path(args.out_dir, *names)
        names = ("best.pt", "ckpt.pt", "pruned.pt")
        if args.done is None and any(os.path.lexists(folder / name) for name in names):
            raise UserError(f"{folder} already holds a run; choose another --out_dir")
    return folder_of


def check(args):
    """Settle the arguments and load the checkpoints. Raises UserError for what makes no sense."""
    for name in ("recover", "floor", "seed", "tokens", "rounds"):
        if vars(args)[name] < 0:
            raise UserError(f"--{name} {vars(args)[name]} must not be negative")
        if vars(args)[name] > LARGEST:
            raise UserError(f"--{name} {vars(args)[name]} must be at most {LARGEST:,}")
    if args.text < 1:
        raise UserError(f"--text {args.text} must be at least 1: criteria read the heads on it")
    if bad := [to for to in args.to if not 0 < to <= 1]:
        raise UserError(f"--to {bad[0]:g} must be above 0 and at most 1")
    for criterion in args.by:
        if criterion not in (*CRITERIA, "all"):
            suggestion = likely_name(criterion, CRITERIA)
            words = f"did you mean {suggestion}?" if suggestion else f"there are {', '.join(CRITERIA)}, all"
            raise UserError(f"--by {criterion}: unknown criterion; {words}")
    if args.out_dir == "":
        raise UserError("--out_dir is empty, as it is when a variable of the shell is not set")
    if args.recover and not args.out_dir:
        raise UserError("--recover needs --out_dir, where the training goes")
    args.to = sorted(set(args.to), reverse=True)
    own_mechanism.add_named(args)
    args.device = pick_device(args.device)
    args.json = writable(args.json) if args.json else None
    args.progress = Path(args.out_dir, "prune.json") if args.out_dir else args.json
    args.loaded = [load(path, args.split, 0, args.device, args.dataset, task=True) for path in args.ckpt]
    ids = [[attn.head_ids for attn in attentions(model)] for _, model, _ in args.loaded]
    for path, (state, model, data), head_ids in zip(args.ckpt, args.loaded, ids):
        check_model(args, path, state, model)
        if head_ids != ids[0] or data.digests != args.loaded[0][2].digests:
            raise UserError(f"{path} and {args.ckpt[0]} have other heads or other data: one at a time")
    args.by = [criterion for criterion in CRITERIA if criterion in args.by or "all" in args.by]
    args.by = [criterion for criterion in args.by
               if not any(why_unfit(criterion, model) for _, model, _ in args.loaded)]
    args.results = results_of(args)
    args.done = rows_done(args)
    folders(args)


def run(args):
    """Prune, measure, write, print; of what was stopped or failed, the rows that are done."""
    _, _, data = args.loaded[0]
    args.done = args.done or []
    rows, of_task = [*args.done], isinstance(data, TaskData)
    if rows:
        say(f"going on: {plural(len(rows), 'row')} in {args.progress}", file=sys.stderr)
    results = dict(**args.results, rows=rows, finished=False)
    files = [path for path in {args.progress, args.json} if path]
    for path in files:
        write_json(path, results)
    try:
        for number in range(len(args.ckpt)):
            for row in rows_of(args, number):
                rows.append(row)
                for path in files:
                    write_json(path, results)
    except (UserError, KeyboardInterrupt):
        if rows:
            print(result_table(rows))
        raise
    if not rows:
        raise UserError("--by blocks: so few heads save fewer FLOPs than any block")
    paths = sorted({row["folder"] for row in rows if "folder" in row})
    for path in files:
        write_json(path, {**results, "finished": True})  # these are all
    if args.json:
        paths.append(args.json)
        if picture := picture_bytes(draw_curves, rows, "png"):
            paths.append(args.json.with_name("pruning.png"))
            write_atomic(paths[-1], lambda f: f.write(picture))
    if of_task:
        size = f"{plural(rows_per_level(data, args.tokens), 'row')} of each level"
    else:
        size = f"{args.tokens or data.splits[args.split]['tokens']:,} tokens"
    note = f"; {len(args.ckpt)} checkpoints, mean and [range]" if len(args.ckpt) > 1 else ""
    if "blocks" in args.by and not any(row["blocks_gone"] for row in rows):
        note += "; blocks: each costs more FLOPs than all the heads that go"
    say(f"{data.meta['name']}, {args.split}: {size}{note}", result_table(rows), *paths)


@as_program("prune")
def main(argv=None):
    args = arguments(argv)
    check(args)
    with only_writer(args.out_dir) if args.out_dir else nullcontext():
        args.done = rows_done(args)
        args.folders = folders(args)  # once more: another process may just have been at work there
        run(args)


if __name__ == "__main__":
    main()

"""
Speed and memory, as ratios measured in one run: training step and cached decoding.

    python bench.py                                   # our recipes against the plain GPT (recipe=gpt2)
    python bench.py --nanogpt ../nanoGPT              # nanoGPT in the same run, and the ratios are to it
    python bench.py --n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --what decode --nanogpt ../nanoGPT
    python bench.py --race --nanogpt ../nanoGPT       # train both for real, to the loss that nanoGPT's README names
    python bench.py --mechanisms all --recipes modern # every mechanism against the plain GPT of one recipe
    python bench.py --mechanisms acag,output_gate --what memory --block_size 4096 --batch_size 1     # peak memory alone
    python bench.py --heads_off 0 .25 .5 .75          # the plain GPT with heads pruned
    python bench.py --contexts 1024 4096 16384        # decoding one token after so many: routing with and without skipping

Contestants take turns, a few steps each, round after round: a machine that slows down slows all of them.
The ratio of a round is within that round; what is printed is the median over rounds with a 95 % interval
(order statistics of the median). A time alone means nothing on a shared machine.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from common import UserError, pick_device, write_atomic
from dataset import Dataset
from evaluate import score, writable
from model import ALL_ON, GPT, MECHANISMS, RECIPES, GPTConfig, KVCache
from optim import make_optimizers
from train import TrainConfig

ROOT = Path(__file__).resolve().parent
SIZES = (("n_layer", 4, 12), ("n_head", 4, 12), ("n_embd", 128, 768), ("block_size", 64, 1024), ("batch_size", 12, 32))  # on cpu, on cuda
REFERENCE_LOSS = 1.886  # nats per character: what nanoGPT's README reports after 2,000 iterations of its CPU setting


def median_interval(values):
    """Median and its 95 % interval from order statistics (from 6 values on; below that the range)."""
    s, n = sorted(values), len(values)
    cut = 0
    while cut < (n - 1) // 2 and 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n <= 0.05:
        cut += 1
    return statistics.median(s), s[cut], s[n - 1 - cut]


# beside model.MECHANISMS: everything together, and routing that computes the selected queries alone (on cuda)
MORE = {"all_on": ALL_ON, "routing_packed": dict(routing="moh", routing_capacity=1.25)}


# ---- contestants: {name: build() -> (model, train step, decode)} ----

def ours(recipe, args, flags={}, off=0.0):
    """A GPT with a mechanism's flags, and this share of each layer's heads pruned."""
    def build():
        config = GPTConfig(block_size=args.block_size, vocab_size=args.vocab_size, n_layer=args.n_layer, n_head=args.n_head,
                           n_embd=args.n_embd, recipe=recipe, **flags)
        model = GPT(config)
        if off:
            model.prune_heads({layer: range(round(off * args.n_head)) for layer in range(args.n_layer)})
        model.to(args.device)
        settings = TrainConfig().for_recipe(recipe)
        optimizers = make_optimizers(model, settings)
        fast = torch.compile(model) if args.compile else model

        def step(x, y):
            with autocast(args):
                out = fast(x, y)
            sum(out.aux.values(), out.loss).backward()
            if settings.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
            out.loss.item()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
        return model, step, lambda idx, n: model.generate(idx, n)
    return build


def nanogpt(path, args):
    def build():
        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path) / "model.py")
        module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # it prints what it counts
        model = module.GPT(module.GPTConfig(block_size=args.block_size, vocab_size=args.vocab_size, n_layer=args.n_layer,
                                            n_head=args.n_head, n_embd=args.n_embd, dropout=0.0, bias=False)).to(args.device)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), torch.device(args.device).type)
        sys.stdout = stdout
        fast = torch.compile(model) if args.compile else model

        def step(x, y):  # the order of its train.py
            with autocast(args):
                _, loss = fast(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()

        def decode(idx, n):
            model.eval()
            out = model.generate(idx, n)
            model.train()
            return out
        return model, step, decode
    return build


def autocast(args):
    return torch.autocast(torch.device(args.device).type, torch.bfloat16) if args.dtype == "bfloat16" else nullcontext()


# ---- measuring ----

def wait(args):
    if torch.device(args.device).type == "cuda":
        torch.cuda.synchronize()


def timed(action, args):
    wait(args)
    began = time.perf_counter()
    action()
    wait(args)
    return time.perf_counter() - began


def rounds(contestants, action, args, what):
    """{name: [seconds of one action, a round each]}, the contestants taking turns."""
    seconds = {name: [] for name in contestants}
    for name in contestants:  # warm up: compilation, allocation, caches
        action(name), action(name)
    for _ in tqdm(range(args.rounds), desc=what, leave=False, disable=not sys.stderr.isatty()):
        for name in contestants:
            seconds[name].append(timed(lambda: action(name), args))
    return seconds


def peak_memory_cpu(name, args):
    """Peak resident bytes that building and three training steps add, in a process of its own; None without /proc."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(memory_worker, (name, args))


def memory_worker(name, args):
    def peak():
        try:
            return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        except OSError:
            return None
    torch.set_num_threads(args.threads)
    tiny = argparse.Namespace(**{**vars(args), "n_layer": 2, "n_head": 6, "n_embd": 96, "block_size": 16, "batch_size": 1})
    contestants_of(tiny)[name]()[1](*batch(tiny))  # what the libraries load at a first step is nobody's memory
    before = peak()
    _, step, _ = contestants_of(args)[name]()
    for _ in range(3):
        step(*batch(args))
    return None if before is None else peak() - before


def batch(args):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(args.vocab_size, (2, args.batch_size, args.block_size), generator=generator).to(args.device)
    return ids[0], ids[1]


def contestants_of(args):
    """The first one is what the ratios are to."""
    recipe = args.recipes[0]
    if args.heads_off:
        return {f"{recipe}-{share:.0%}": ours(recipe, args, off=share) for share in args.heads_off}
    if args.mechanisms:
        known = {**MECHANISMS, **MORE}
        names = [n for name in args.mechanisms.split(",") for n in ([*MECHANISMS, "all_on"] if name == "all" else [name])]
        return {recipe: ours(recipe, args), **{name: ours(recipe, args, known[name]) for name in names}}
    made = {"nanogpt": nanogpt(args.nanogpt, args)} if args.nanogpt else {}
    return {**made, **{recipe: ours(recipe, args) for recipe in args.recipes}}


def matmul_rate(args, n=8192):
    """Measured bf16 matrix-product rate of the device in TFLOP/s: the ceiling that utilisation is a share of."""
    a, b = (torch.randn(n, n, device=args.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = [timed(lambda: [a @ b for _ in range(10)], args) / 10 for _ in range(5)]
    return 2 * n**3 / statistics.median(seconds) / 1e12


def bench(args):
    """All figures as rows: one per contestant and kind of work."""
    names = list(contestants_of(args))
    cuda = torch.device(args.device).type == "cuda"
    rows, rate = [], matmul_rate(args) if cuda else None
    x, y = batch(args)
    built, kept = {}, {}
    if args.what == "memory":
        for name, build in tqdm(contestants_of(args).items(), desc="memory", leave=False, disable=not sys.stderr.isatty()):
            rows.append(dict(what="memory", name=name, peak_bytes=fresh_peak_cuda(build, x, y) if cuda else peak_memory_cpu(name, args)))
        return rows, rate
    for name, build in contestants_of(args).items():
        before = torch.cuda.memory_allocated() if cuda else 0
        built[name] = build()
        if cuda:
            built[name][1](x, y)  # a first step makes the optimizer's state
            kept[name] = torch.cuda.memory_allocated() - before
    for what in args.what.split(","):
        if what == "train":
            tokens = args.batch_size * args.block_size * args.steps
            def action(name):
                for _ in range(args.steps):
                    built[name][1](x, y)
        else:
            tokens = args.block_size - 1
            start = torch.zeros(1, 1, dtype=torch.long, device=args.device)
            def action(name):
                with autocast(args):
                    built[name][2](start, tokens)
        seconds = rounds(names, action, args, what)
        for name in names:
            ratio = median_interval([a / b for a, b in zip(seconds[name], seconds[names[0]])])
            median = statistics.median(seconds[name])
            row = dict(what=what, name=name, tokens_per_s=tokens / median, ms=1000 * median / (args.steps if what == "train" else tokens),
                       time_ratio=ratio[0], time_ratio_low=ratio[1], time_ratio_high=ratio[2], reference=names[0], rounds=args.rounds)
            if what == "train" and (cuda or args.memory):
                model = built[name][0]
                if cuda and isinstance(model, GPT):
                    row["share_of_matmul_rate"] = model.flops_per_token() * row["tokens_per_s"] / (rate * 1e12)
                    row["mfu"] = model.mfu(row["tokens_per_s"], args.device, args.dtype)
                row["peak_bytes"] = kept[name] + peak_memory_cuda(built[name][1], x, y) if cuda else peak_memory_cpu(name, args)
            rows.append(row)
    return rows, rate


def peak_memory_cuda(step, x, y):
    """Peak bytes of a step beyond what the weights and optimizer states of all contestants take."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(x, y)
    return torch.cuda.max_memory_allocated() - before


def fresh_peak_cuda(build, x, y):
    """Peak bytes of a model built, trained for two steps and thrown away again."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    _, step, _ = build()
    step(x, y)
    torch.cuda.reset_peak_memory_stats()
    step(x, y)
    return torch.cuda.max_memory_allocated() - before


def decode_rows(args):
    """Milliseconds of one cached token after `context` others: all heads read, or only those that the router selects."""
    cuda, rows = torch.device(args.device).type == "cuda", []
    for context in tqdm(args.contexts, desc="contexts", leave=False, disable=not sys.stderr.isatty()):
        built = {}
        for name, flags in dict(plain={}, dense=dict(routing="moh", routing_skip=False), skip=dict(routing="moh")).items():
            model = GPT(GPTConfig(block_size=context + 1, vocab_size=args.vocab_size, n_layer=args.n_layer, n_head=args.n_head,
                                  n_embd=args.n_embd, recipe=args.recipes[0], **flags)).to(args.device).eval()
            cache, size = KVCache(model.config), model.config.head_size
            for layer in range(args.n_layer):  # what the keys say does not change the time
                cache.append(layer, *torch.randn(2, args.batch_size, args.n_head, context, size, device=args.device, dtype=getattr(torch, args.dtype)))
            cache.length = context
            built[name] = model, cache
        token = torch.zeros(args.batch_size, 1, dtype=torch.long, device=args.device)

        def action(name):
            model, cache = built[name]
            with torch.inference_mode(), autocast(args):
                for _ in range(args.steps):
                    model.head(model.hidden(token, cache))
                    cache.length = context
        seconds = rounds(list(built), action, args, f"context {context}")
        for name in built:
            ratio = median_interval([a / b for a, b in zip(seconds[name], seconds["dense"])])
            rows.append(dict(what=f"{context:,}", name=name, tokens_per_s=args.steps * args.batch_size / statistics.median(seconds[name]),
                             ms=1000 * statistics.median(seconds[name]) / args.steps, time_ratio=ratio[0], time_ratio_low=ratio[1],
                             time_ratio_high=ratio[2], reference="dense", rounds=args.rounds))
    return rows


def table(rows):
    if rows[0]["what"] == "memory":
        first = rows[0]["peak_bytes"] or math.nan
        return "\n".join([f"{'model':<22}{'peak memory':>14}{'ratio':>8}"] + [f"{r['name']:<22}{(r['peak_bytes'] or math.nan) / 2**20:>10,.0f} MiB{(r['peak_bytes'] or math.nan) / first:>8.2f}" for r in rows])
    interval = "[95 %]" if rows[0]["rounds"] >= 6 else "[range]"
    lines = [f"{'work':<7}{'model':<22}{'tokens/s':>12}{'ms':>10}   {f'time ratio {interval}':<24}{'speed':>7}   {'peak memory, ratio':>18}  use"]
    for r in rows:
        first = rows[0].get("peak_bytes") or math.nan
        memory = f"{r['peak_bytes'] / 2**20:,.0f} MiB {r['peak_bytes'] / first:.2f}" if r.get("peak_bytes") else ""
        share = f"{r['share_of_matmul_rate']:.1%} of the measured rate" if "share_of_matmul_rate" in r else ""
        ratio = f"{r['time_ratio']:.3f} [{r['time_ratio_low']:.3f}, {r['time_ratio_high']:.3f}]"
        lines.append(f"{r['what']:<7}{r['name']:<22}{r['tokens_per_s']:>12,.0f}{r['ms']:>10.3f}   {ratio:<24}"
                     f"{1 / r['time_ratio']:>6.2f}x   {memory:>18}  {share}".rstrip())
    return "\n".join(lines)


# ---- the race: how soon is nanoGPT's own result reached? ----

def race(args):
    """Train nanoGPT and recipe=modern as their users would, in turn, and score both on the whole validation split."""
    out, rows = Path("out/race"), []
    data = Dataset("shakespeare_char")
    out.mkdir(parents=True, exist_ok=True)
    shape = "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 --device=cpu --compile=False".split()
    for seed in range(1337, 1337 + args.seeds):
        results = {}
        for name in ("nanogpt", "modern") if seed % 2 else ("modern", "nanogpt"):
            folder = (out / f"{name}-{seed}").resolve()
            if name == "nanogpt":  # its README's CPU command; its seed is fixed in the script, so each run gets another by text
                source = (Path(args.nanogpt) / "train.py").read_text().replace("torch.manual_seed(1337", f"torch.manual_seed({seed}")
                command = ["-c", f"__file__ = 'train.py'\n{source}", "config/train_shakespeare_char.py", *shape, "--eval_iters=1",
                           "--eval_interval=2000", "--log_interval=10", "--max_iters=2000", "--lr_decay_iters=2000", f"--out_dir={folder}",
                           "--always_save_checkpoint=True"]
                lines = run_timed(command, args.nanogpt)
                stamps = [at for at, line in lines if re.match(r"iter \d+:", line)]
                loop, score_this = stamps[-1] - stamps[0], folder / "ckpt.pt"
                steps = 2000
            else:
                command = [str(ROOT / "train.py"), "config/shakespeare_cpu.py", "--device=cpu", f"--max_iters={args.iters}",
                           "--eval_interval=1000000", "--eval_tokens=1000", f"--seed={seed}", f"--out_dir={folder}", "--overwrite"]
                lines = run_timed(command, ROOT)
                log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
                loop, score_this, steps = log[-1]["elapsed_s"], folder / "ckpt.pt", args.iters
            model = checkpoint.build(checkpoint.read(score_this), score_this)
            nats, count = score(model, data, "val")
            results[name] = dict(seed=seed, name=name, steps=steps, val_loss=nats / count, loop_s=loop, process_s=lines[-1][0])
            print(f"seed {seed}  {name:<8} {steps:>5} steps  val {nats / count:.4f} nats/char over {count:,}  "
                  f"loop {loop:6.1f} s  process {lines[-1][0]:6.1f} s", flush=True)
        rows.append(dict(seed=seed, **{f"{k}_{n}": v for n, r in results.items() for k, v in r.items() if k not in ("seed", "name")}))
    mean = {n: statistics.mean(r[f"val_loss_{n}"] for r in rows) for n in ("nanogpt", "modern")}
    for part in ("loop", "process"):
        ratios = [r[f"{part}_s_modern"] / r[f"{part}_s_nanogpt"] for r in rows]
        print(f"wall time of the {part}: {statistics.mean(ratios):.3f} of nanoGPT's (each seed: {', '.join(f'{x:.3f}' for x in ratios)})")
    print(f"mean val loss: modern {mean['modern']:.4f} after {args.iters} steps, nanoGPT {mean['nanogpt']:.4f} after 2,000; "
          f"{REFERENCE_LOSS} {'reached' if mean['modern'] <= REFERENCE_LOSS else 'not reached'}")
    return rows


def run_timed(command, folder):
    """[(seconds since the start, line)] of a Python command's output, with one more entry for its end."""
    began, lines = time.perf_counter(), []
    process = subprocess.Popen([sys.executable, "-u", *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        lines.append((time.perf_counter() - began, line.rstrip()))
    if process.wait():
        sys.exit(f"bench: {command[0][:40]} failed: {process.stderr.read()[-800:]}")
    return lines + [(time.perf_counter() - began, "")]


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--what", choices=["train", "decode", "train,decode", "memory"], help="default train,decode; with --mechanisms train")
    p.add_argument("--nanogpt", help="a nanoGPT checkout to run side by side")
    p.add_argument("--recipes", nargs="+", choices=sorted(RECIPES), default=["gpt2", "modern"])
    p.add_argument("--mechanisms", help="all, or names of model.MECHANISMS, all_on, routing_packed, with commas between: each against the first of --recipes")
    p.add_argument("--heads_off", nargs="+", type=float, help="shares of pruned heads, from 0 to below 1, each against the first")
    p.add_argument("--contexts", nargs="+", type=int, help="decode one token after so many, with routing dense and skipping")
    p.add_argument("--race", action="store_true", help="train both to nanoGPT's published loss (needs --nanogpt, its data prepared)")
    p.add_argument("--seeds", type=int, default=3, help="race: how many")
    p.add_argument("--iters", type=int, default=240, help="race: our training steps")
    for name, cpu, cuda in SIZES:
        p.add_argument(f"--{name}", type=int, help=f"default {cpu} on cpu, {cuda} on cuda")
    p.add_argument("--vocab_size", type=int, default=256)
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default float32 on cpu, bfloat16 on cuda")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default on cuda only")
    p.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="on cpu: measure peak memory too, a process each")
    p.add_argument("--rounds", type=int, default=11)
    p.add_argument("--steps", type=int, default=10, help="training steps in a round")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--json", help="write all figures to this file")
    args = p.parse_args(argv)
    try:
        args.device = pick_device(args.device)
        for name in ("rounds", "steps", "threads", "seeds", "iters"):
            if getattr(args, name) < 1:
                raise UserError(f"--{name} must be at least 1")
        args.what = args.what or ("train" if args.mechanisms else "train,decode")
        if args.mechanisms and (unknown := sorted({*args.mechanisms.split(",")} - {"all", *MECHANISMS, *MORE})):
            raise UserError(f"--mechanisms: no {', '.join(unknown)}; there are all, {', '.join([*MECHANISMS, *MORE])}")
        if sum(map(bool, (args.mechanisms, args.heads_off, args.contexts, args.race))) > 1:
            raise UserError("--mechanisms, --heads_off, --contexts and --race are four different benchmarks: one at a time")
        if any(not 0 <= share < 1 for share in args.heads_off or ()) or any(context < 1 for context in args.contexts or ()):
            raise UserError("--heads_off takes shares from 0 to below 1, --contexts positive numbers")
        if args.json:
            args.json = str(writable(args.json))
        if args.race and not args.nanogpt or args.nanogpt and not (Path(args.nanogpt) / "model.py").is_file():
            raise UserError("--nanogpt must name a nanoGPT checkout (a folder with model.py)")
        measure(args)
    except ValueError as e:
        sys.exit(f"bench: {e}")


def measure(args):
    cuda = torch.device(args.device).type == "cuda"
    for name, on_cpu, on_cuda in (*SIZES, ("dtype", "float32", "bfloat16"), ("compile", False, True)):
        if getattr(args, name) is None:
            setattr(args, name, on_cuda if cuda else on_cpu)
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 256  # each contestant is one more graph of GPT.forward: beyond 8 they would silently run eager
    torch._dynamo.config.accumulated_recompile_limit = 4096
    if not 2 <= args.block_size:
        raise ValueError(f"--block_size={args.block_size} must be at least 2")
    if args.race:
        print(f"torch {torch.__version__}, cpu, float32: nanoGPT's CPU setting (4 layers, 4 heads, 128 wide, context 64, batch 12)")
        rows, rate, arguments = race(args), None, dict(seeds=args.seeds, iters=args.iters)
    else:
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else f'cpu, {args.threads} threads'}, {args.dtype}"
              f"{', compiled' if args.compile else ''}: {args.n_layer} layers, {args.n_head} heads, {args.n_embd} wide, "
              f"context {args.block_size}, batch {args.batch_size}, vocabulary {args.vocab_size}")
        (rows, rate), arguments = (decode_rows(args), None) if args.contexts else bench(args), vars(args)
        print(table(rows))
        if rate:
            print(f"measured bf16 matrix product: {rate:.0f} TFLOP/s")
    if args.json:
        result = dict(torch=torch.__version__, arguments=arguments, measured_matmul_tflops=rate, rows=rows)
        write_atomic(args.json, lambda f: f.write(json.dumps(result, indent=1).encode()))
        print(args.json)


if __name__ == "__main__":
    main()

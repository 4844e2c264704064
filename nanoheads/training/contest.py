"""
Contestants: models that train and decode in turns, so that their speed and memory can be compared.

A training step is that of the Trainer in optim.py, as in train.py. Contestants take turns, a few steps
each, round after round: a machine that slows down slows all of them. `args` are those of bench.py.
"""

import argparse
import functools
import gc
import importlib.util
import multiprocessing
import os
import re
import statistics
import sys
from pathlib import Path

import torch

from model import ALL_ON, GPT, MECHANISMS, GPTConfig, KVCache
from nanoheads.common import explain, keep_freed_memory
from nanoheads.hub import own_mechanism
from nanoheads.pruning import prune_heads
from nanoheads.timing import mfu, on_cuda, progress_bar, take_turns, time_rows, timed
from nanoheads.training.config import TrainConfig
from nanoheads.training.optim import Trainer, precision
from nanoheads.training.ranks import Process

# beside model.MECHANISMS: everything together, and routing that computes the selected queries alone (on cuda)
MORE = {"all_on": ALL_ON, "routing_packed": dict(routing="moh", routing_capacity=1.25)}


# ---- contestants: {name: build() -> (model, train step, decode)} ----

def gpt_config(args, block_size, **flags):
    return GPTConfig(vocab_size=args.vocab_size, block_size=block_size, n_layer=args.n_layer,
                     n_head=args.n_head, n_embd=args.n_embd, **flags)


def ours(recipe, args, flags={}, off=0.0):
    """A GPT with a mechanism's flags, and this share of each layer's heads pruned."""
    def build():
        model = GPT(gpt_config(args, args.block_size, recipe=recipe, **flags))
        if off:
            prune_heads(model, {layer: range(round(off * args.n_head)) for layer in range(args.n_layer)})
        config = TrainConfig(dtype=args.dtype, compile=args.compile,
                             compile_mode=args.compile_mode).for_recipe(recipe)
        trainer = Trainer(model.to(args.device), config, Process(args.device))
        return model, functools.partial(trainer.step, at_once=False), model.generate
    return build


def nanogpt(path, args):
    """nanoGPT's model, and the step of its train.py."""
    def build():
        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path) / "model.py")
        module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # it prints what it counts
        config = module.GPTConfig(vocab_size=args.vocab_size, block_size=args.block_size,
                                  n_layer=args.n_layer, n_head=args.n_head, n_embd=args.n_embd,
                                  dropout=0.0, bias=False)
        model = module.GPT(config).to(args.device)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), torch.device(args.device).type)
        sys.stdout = stdout
        compiled = torch.compile(model) if args.compile else model

        def step(x, y):
            with autocast(args):
                _, loss = compiled(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)  # its train.py reads the loss of every tenth step

        def decode(idx, n):
            model.eval()
            out = model.generate(idx, n)
            model.train()
            return out
        return model, step, decode
    return build


def contestants_of(args):
    """{name: build}; the first one is what the ratios are to."""
    recipe = args.recipes[0]
    if args.heads_off:
        return {f"{recipe}-{share:.0%}": ours(recipe, args, off=share) for share in args.heads_off}
    if args.mechanisms:
        flags = {**MECHANISMS, **MORE}
        names = []
        for name in args.mechanisms.split(","):
            names += [*MECHANISMS, "all_on"] if name == "all" else [name]
        return {recipe: ours(recipe, args), **{name: ours(recipe, args, flags[name]) for name in names}}
    first = {"nanogpt": nanogpt(args.nanogpt, args)} if args.nanogpt else {}
    return {**first, **{recipe: ours(recipe, args) for recipe in args.recipes}}


# ---- measuring ----

def autocast(args):
    return precision(args.dtype, torch.device(args.device).type)[1]


def batch(args):
    """Random inputs and targets, [B, T] each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(args.vocab_size, (2, args.batch_size, args.block_size), generator=generator)
    return ids.to(args.device)


def matmul_rate(args, n=8192):
    """Measured bf16 matrix-product rate in TFLOP/s: the ceiling that utilisation is a share of."""
    a, b = torch.randn(2, n, n, device=args.device, dtype=torch.bfloat16)
    seconds = [timed(lambda: [a @ b for _ in range(10)], args.device) / 10 for _ in range(5)]
    return 2 * n**3 / statistics.median(seconds) / 1e12


# ---- peak memory ----

def peak_memory_cpu(name, args):
    """Peak resident bytes that building and three steps add, in a process of its own; None without /proc."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(memory_worker, (name, args))


def memory_worker(name, args):
    def peak():
        try:
            return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        except OSError:
            return None
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    for path in (vars(args).get("own_mechanism") or "").split(","):
        if path:  # this process has not read it yet
            own_mechanism.add(path)
    # what the libraries load at a first step is not the model's memory
    tiny = argparse.Namespace(**{**vars(args), "n_layer": 2, "n_head": 6, "n_embd": 96, "block_size": 16,
                                 "batch_size": 1})
    contestants_of(tiny)[name]()[1](*batch(tiny))
    before = peak()
    _, step, _ = contestants_of(args)[name]()
    for _ in range(3):
        step(*batch(args))
    return None if before is None else peak() - before


def step_peak_cuda(step, x, y):
    """Peak bytes of a step beyond the weights and optimizer states of all contestants."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(x, y)
    return torch.cuda.max_memory_allocated() - before


def build_peak_cuda(build, x, y):
    """Peak bytes of a model built, trained for two steps and thrown away again."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    _, step, _ = build()
    step(x, y)
    torch.cuda.reset_peak_memory_stats()
    step(x, y)
    return torch.cuda.max_memory_allocated() - before


def memory_rows(args):
    """Yield the peak memory of each contestant alone."""
    for name, build in progress_bar(contestants_of(args).items(), "memory"):
        try:
            peak = build_peak_cuda(build, *batch(args)) if on_cuda(args) else peak_memory_cpu(name, args)
            row = dict(what="memory", name=name, peak_bytes=peak)
        except Exception as e:
            row = failure("memory", name, e)
        yield row
        free_memory(args)


# ---- training steps and decoding ----

class Contest:
    """Contestants side by side: built and dropped by name, and timed taking turns; rate: matmul_rate()."""

    def __init__(self, args, rate):
        self.args, self.rate = args, rate
        self.x, self.y = batch(args)
        self.builders = contestants_of(args)
        self.built, self.own_bytes = {}, {}  # own: on cuda, its weights and the optimizer's state
        self.measured = set()  # (kind of work, name)

    def build(self, name):
        cuda = on_cuda(self.args)
        before = torch.cuda.memory_allocated() if cuda else 0
        self.built[name] = self.builders[name]()
        if cuda:
            _, step, _ = self.built[name]
            step(self.x, self.y)  # a first step makes the optimizer's state
            self.own_bytes[name] = torch.cuda.memory_allocated() - before

    def drop(self, name):
        self.built.pop(name, None)
        free_memory(self.args)

    def train(self, name):
        _, step, _ = self.built[name]
        for _ in range(self.args.steps):
            step(self.x, self.y)

    def decode(self, name):
        _, _, generate = self.built[name]
        with autocast(self.args):
            prompts = torch.zeros(self.args.decode_batch, 1, dtype=torch.long, device=self.args.device)
            generate(prompts, self.args.block_size - 1)

    def rows(self):
        """Yield a row for each that is built and each kind of work, once; the ratios are to the first."""
        args, first = self.args, next(iter(self.built))
        for what in args.what.split(","):
            if what == "decode":
                seconds = take_turns(self.built, self.decode, args, what)
                repeats = args.block_size - 1
                tokens = repeats * args.decode_batch
            else:
                seconds = take_turns(self.built, self.train, args, what)
                tokens, repeats = args.steps * args.batch_size * args.block_size, args.steps
            for row in time_rows(what, seconds, first, tokens, repeats):
                if (what, row["name"]) not in self.measured:
                    row.update(self.more_of(row) if what == "train" else {})
                    self.measured.add((what, row["name"]))
                    yield row

    def more_of(self, row):
        """What else is known of a training step: its share of the device's rate, its memory."""
        args, name = self.args, row["name"]
        if not on_cuda(args):
            return {"peak_bytes": peak_memory_cpu(name, args)} if args.memory else {}
        model, step, _ = self.built[name]
        found = {"peak_bytes": self.own_bytes[name] + step_peak_cuda(step, self.x, self.y)}
        if name == "nanogpt":  # which is recipe=gpt2, counted by our formula
            model, _, _ = self.built.get("gpt2", (None, None, None))
        if model is not None:
            used = model.flops_per_token() * row["tokens_per_s"]
            found.update(share_of_matmul_rate=used / (self.rate * 1e12),
                         mfu=mfu(model, row["tokens_per_s"], args.device, args.dtype))
        return found


def contest_rows(args, rate):
    """Yield rows of all contestants, which take turns together."""
    contest = Contest(args, rate)
    for name in contest.builders:
        contest.build(name)
    yield from contest.rows()


def pair_rows(args, rate):
    """Yield rows of each contestant taking turns with the first alone; the first's own from one pair."""
    contest = Contest(args, rate)
    first, *others = contest.builders
    contest.build(first)
    for name in others:
        try:
            contest.build(name)
            yield from contest.rows()
        except Exception as e:
            yield failure(args.what, name, e)
        contest.drop(name)


def failure(what, name, e):
    """The row of a contestant that an exception ended."""
    text = explain(e) or f"{type(e).__name__}: {' '.join(str(e).split())}"
    return dict(what=what, name=name, error=text.splitlines()[0][:300])


def free_memory(args):
    """Give back what a contestant that is gone has held: its trainer and its compiled code form cycles."""
    gc.collect()
    if on_cuda(args):
        torch.cuda.empty_cache()


def decode_rows(args):
    """Yield the times of one more token after each of args.contexts.

    Ours, from a cache: all heads read, or only the selected ones. With nanoGPT: it reads all again.
    """
    token = torch.zeros(args.batch_size, 1, dtype=torch.long, device=args.device)
    recipe = args.recipes[0]
    variants = dict(plain=dict(recipe=recipe), dense=dict(recipe=recipe, routing="moh", routing_skip=False),
                    skip=dict(recipe=recipe, routing="moh"))
    if args.nanogpt:
        variants = {recipe: dict(recipe=recipe) for recipe in args.recipes}
    for context in progress_bar(args.contexts, "contexts"):
        actions = {"nanogpt": whole_again(context, args)} if args.nanogpt else {}
        actions.update({name: cached(context, flags, args) for name, flags in variants.items()})

        def decode(name):
            with torch.inference_mode(), autocast(args):
                for _ in range(args.steps):
                    actions[name](token)
        seconds = take_turns(actions, decode, args, f"context {context}")
        yield from time_rows(f"{context:,}", seconds, "nanogpt" if args.nanogpt else "dense",
                             args.steps * args.batch_size, args.steps)


def whole_again(context, args):
    """action(token): nanoGPT's logits after `context` tokens and this one."""
    model, _, _ = nanogpt(args.nanogpt, argparse.Namespace(**{**vars(args), "block_size": context + 1}))()
    model.eval()
    idx = torch.zeros(args.batch_size, context, dtype=torch.long, device=args.device)
    return lambda token: model(torch.cat((idx, token), 1))


def cached(context, flags, args):
    """action(token): our logits after a cache that holds `context` tokens, and this one."""
    model, cache = filled_cache(context, flags, args)

    def action(token):
        model.head(model.hidden(token, cache))
        cache.length = context
    return action


def filled_cache(context, flags, args):
    """(model, cache that holds `context` tokens): what the keys hold does not change the time."""
    model = GPT(gpt_config(args, context + 1, **flags)).to(args.device).eval()
    cache = KVCache(model.config)
    shape = (2, args.batch_size, args.n_head, context, model.config.head_size)
    for layer in range(args.n_layer):
        cache.append(layer, *torch.randn(shape, device=args.device, dtype=getattr(torch, args.dtype)))
    cache.length = context
    return model, cache

"""
How long one more token takes after contexts of several lengths.

    python -m lab.bench.contexts 1024 4096 16384                   # routing that skips heads, or does not
    python -m lab.bench.contexts 128 1024 --nanogpt ../nanoGPT     # our recipes, and nanoGPT

Ours decode from a cache: the plain GPT, and with routing=moh all heads or only the selected ones. With
--nanogpt it is our recipes beside nanoGPT, which reads the whole context again. The contestants take turns,
and the ratio of a round is within that round (see bench.py).
"""

import argparse

from nanoheads import threads  # before torch, whose threads it has wait briefly

import torch

from model import RECIPES, GPT, GPTConfig, KVCache
from nanoheads.common import (ArgumentParser, UserError, as_program, last_words, pick_device, plural, say,
                              writable, write_json)
from nanoheads.optim import precision
from nanoheads.timing import on_cuda, progress_bar, take_turns, time_line, time_rows, time_table
from lab.bench import nanogpt

# option: (default on cpu, default on cuda)
SIZES = {"n_layer": (4, 12), "n_head": (4, 12), "n_embd": (128, 768), "batch_size": (12, 32)}
LARGEST = 2**31 - 1  # of any count


def context_rows(args):
    """Yield a row for each context and contestant; ratios are to nanoGPT, or to routing that skips none."""
    token = torch.zeros(args.batch_size, 1, dtype=torch.long, device=args.device)
    recipe = args.recipes[0]
    variants = dict(plain=dict(recipe=recipe), dense=dict(recipe=recipe, routing="moh", routing_skip=False),
                    skip=dict(recipe=recipe, routing="moh"))
    if args.nanogpt:
        variants = {recipe: dict(recipe=recipe) for recipe in args.recipes}
    for context in progress_bar(args.contexts, "contexts"):
        actions = {"nanogpt": read_again(context, args)} if args.nanogpt else {}
        actions.update({name: cached(context, flags, args) for name, flags in variants.items()})

        def decode(name):
            with torch.inference_mode(), precision(args.dtype, torch.device(args.device).type)[1]:
                for _ in range(args.steps):
                    actions[name](token)
        seconds = take_turns(actions, decode, args, f"context {context}")
        yield from time_rows(f"{context:,}", seconds, "nanogpt" if args.nanogpt else "dense",
                             args.steps * args.batch_size, args.steps)


def read_again(context, args):
    """action(token): nanoGPT's logits after `context` tokens and this one."""
    model, _ = nanogpt.load(args.nanogpt, args, context + 1)
    model.eval()
    idx = torch.zeros(args.batch_size, context, dtype=torch.long, device=args.device)
    context_of_theirs = nanogpt.autocast(args)

    def action(token):
        with context_of_theirs:
            model(torch.cat((idx, token), 1))
    return action


def cached(context, flags, args):
    """action(token): our logits after a cache that holds `context` tokens, and this one."""
    config = GPTConfig(vocab_size=args.vocab_size, block_size=context + 1, n_layer=args.n_layer,
                       n_head=args.n_head, n_embd=args.n_embd, **flags)
    model = GPT(config).to(args.device).eval()
    cache = KVCache(config)
    shape = (2, args.batch_size, args.n_head, context, config.head_size)
    for layer in range(args.n_layer):  # what the keys hold does not change the time
        cache.append(layer, *torch.randn(shape, device=args.device, dtype=getattr(torch, args.dtype)))
    cache.length = context

    def action(token):
        model.head(model.hidden(token, cache))
        cache.length = context
    return action


def arguments(argv):
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("contexts", nargs="+", type=int, help="so many tokens are in the cache")
    p.add_argument("--nanogpt", help="a nanoGPT checkout to run side by side")
    p.add_argument("--recipes", nargs="+", choices=sorted(RECIPES), default=["gpt2", "modern"],
                   help="without --nanogpt the first counts (default: gpt2 modern)")
    for name, (cpu, cuda) in SIZES.items():
        p.add_argument(f"--{name}", type=int, help=f"default {cpu} on cpu, {cuda} on cuda")
    p.add_argument("--vocab_size", type=int, default=256)
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", choices=["float32", "bfloat16"],
                   help="default float32 on cpu, bfloat16 on cuda")
    p.add_argument("--rounds", type=int, default=11)
    p.add_argument("--steps", type=int, default=10, help="tokens in a round")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--json", help="write all figures to this file, anew with each row")
    return p.parse_args(argv)


def check(args):
    """Fill in what follows from the device. Raises UserError for the first argument that makes no sense."""
    args.device = pick_device(args.device)
    for name, (cpu, cuda) in {**SIZES, "dtype": ("float32", "bfloat16")}.items():
        if getattr(args, name) is None:
            setattr(args, name, cuda if on_cuda(args) else cpu)
    names = (*SIZES, "vocab_size", "rounds", "steps", "threads")
    counts = [("context", context) for context in args.contexts]
    for name, count in (*counts, *((f"--{name}", getattr(args, name)) for name in names)):
        if not 1 <= count <= LARGEST:
            raise UserError(f"{name}={count} must be from 1 to {LARGEST:,}")
    if args.nanogpt:
        nanogpt.check(args.nanogpt)
    if args.json:
        args.json = str(writable(args.json))


@as_program("contexts")
def main(argv=None):
    with last_words("contexts", "smaller sizes need less"):
        args = arguments(argv)
        check(args)
        run(args)


def run(args):
    """Measure every context, print each row as it is made and a table at the end; all rows go to --json."""
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    machine = torch.cuda.get_device_name() if on_cuda(args) else threads.on_processor()
    print(f"torch {torch.__version__}, {machine}, {args.dtype}: {plural(args.n_layer, 'layer')}, "
          f"{plural(args.n_head, 'head')}, {args.n_embd} wide, batch {args.batch_size}, "
          f"vocabulary {args.vocab_size}{nanogpt.setting(args) if args.nanogpt else ''}", flush=True)
    rows = []
    for row in context_rows(args):
        rows.append(row)
        write(args, rows, finished=False)
        say(time_line(row), flush=True)
    write(args, rows, finished=True)
    print(time_table(rows))
    if args.json:
        say(args.json)


def write(args, rows, finished):
    if args.json:
        write_json(args.json, dict(torch=torch.__version__, processor=threads.on_processor(),
                                   arguments=vars(args), finished=finished, rows=rows))


if __name__ == "__main__":
    main()

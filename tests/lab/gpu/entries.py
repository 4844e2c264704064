"""
What the GPU check compiles: every mechanism, combinations that share a kernel, and variants of the plain GPT.

A check is one thing to compile: an entry, a kind, a head size, a dtype and a card. Its key is these, joined:
"acag train 64 bfloat16 sm_90". There are three kinds:
    steps   five training steps with moving schedules, Dynamo alone
    train   a training step, forward and backward
    eval    FlexAttention in evaluation, traces, a prompt and one cached decode step
"""

import functools
from typing import NamedTuple, Optional

from model import ALL_ON, GPT, MECHANISMS, GPTConfig

CARDS = ("sm_90", "sm_80", "sm_89")
# cards on which fewer entries are compiled, and their dtype: T4 and RTX 20, B200, RTX 50
MORE_CARDS = {"sm_75": "float16", "sm_100": "bfloat16", "sm_120": "bfloat16"}
HEAD_SIZES = (16, 32, 128)  # beside 64, which all have
NO_LABELS = " (no labels)"  # the end of an entry's name
SIZE = dict(vocab_size=256, n_layer=2, n_head=4, block_size=256, recipe="modern")
BATCH = 2

SCORE = dict(constraint_names=["a"], constraint_gate="score")


def both(*names):
    """The flags of several mechanisms together."""
    return {flag: value for name in names for flag, value in MECHANISMS[name].items()}


VARIANTS = {
    "gpt2": dict(recipe="gpt2"),
    "gpt2, dropout": dict(recipe="gpt2", dropout=0.1),
    "gpt2, bias": dict(recipe="gpt2", bias=True),
    "parallel, softcap": dict(parallel=True, softcap=15.0),
    "llama": dict(recipe="llama", n_kv_head=2),
    "llama, scales": dict(recipe="llama", n_kv_head=2, qk_norm=True, qk_scale=True, qkv_bias=True,
                          norm_eps=1e-5),
    "grouped": dict(n_kv_head=2),
    "grouped, fox, window": dict(n_kv_head=2, fox=True, window=64, xsa=True),
    "vocabulary": dict(vocab_size=50257),
    "portions": dict(loss_chunks=4),
    "portions, a2c_temperature": dict(loss_chunks=4, **MECHANISMS["a2c_temperature"]),
    "accumulated": {},  # gradients of two portions; autocast casts the weights in each
    "constraint_score": SCORE,
    "constraint_score+xsa": {**SCORE, **MECHANISMS["xsa"]},
    "constraint_score+acag": {**SCORE, **MECHANISMS["acag"]},
    "constraint_score+window": {**SCORE, **MECHANISMS["window"]},
    "window_layers": dict(window=64, window_layers=[0]),
    "window_layers+sink": dict(window=64, window_layers=[0], sink=True),
    "a2c_key_bias+acag": both("a2c_key_bias", "acag"),
    "roles+acag": both("roles", "acag"),
    "a2c_key_bias+sink": both("a2c_key_bias", "sink"),
    "roles+sink": both("roles", "sink"),
    "checkpointed": dict(checkpoint_activations=True),
    "checkpointed+acag": dict(checkpoint_activations=True, **MECHANISMS["acag"]),
    "checkpointed+value_residual": dict(checkpoint_activations=True, value_residual=True),
    "rivals": {**MECHANISMS["short_conv"], **MECHANISMS["value_residual"], **MECHANISMS["value_embedding"],
               **MECHANISMS["query_gain"], **MECHANISMS["fox"], **MECHANISMS["stream_scalars"]},
    "checkpointed+mudd": dict(checkpoint_activations=True, **MECHANISMS["mudd"]),
    "paired_heads+sink": both("paired_heads", "sink"),
    "diff+window": both("diff", "window"),
    "checkpointed+window": dict(checkpoint_activations=True, **MECHANISMS["window"]),
    "checkpointed+all_on": dict(checkpoint_activations=True, **ALL_ON),
    "thaw": dict(MECHANISMS["acag"]),  # the trunk is frozen, and thaws in the fourth step
}
ENTRIES = {"plain": {}, **MECHANISMS, "all_on": ALL_ON, **VARIANTS}
ENTRIES.update({name + NO_LABELS: flags for name, flags in ENTRIES.items() if "constraint_names" in flags
                and not name.startswith("checkpointed")})
# keys of TrainConfig that entries are trained with
TRAINING = {"thaw": dict(freeze_trunk=True, thaw_from=3), "accumulated": dict(grad_accum=2)}
# variants compiled at every head size, beside the plain GPT and each mechanism that uses FlexAttention
ALL_SIZES = ("plain", "all_on", "fox", "relative_bias", "constraint_score", "a2c_key_bias+acag", "roles+acag",
             "a2c_key_bias+sink", "roles+sink")
# no model: Muon's update, as the optimizer calls it on a GPU
MUON = "muon"
QUICK = ("plain", "gpt2", "acag", "sink", "all_on", "fox")


class Check(NamedTuple):
    """One thing to compile."""

    entry: str
    kind: str
    head_size: int = 64
    dtype: str = "bfloat16"
    card: str = CARDS[0]

    @property
    def key(self):
        return " ".join((self.entry, *map(str, self[1:])))


def settings(check):
    """The GPTConfig of a check's model."""
    flags = dict(ENTRIES[check.entry])
    size = {**SIZE, "n_embd": SIZE["n_head"] * check.head_size}
    if (check.head_size, check.dtype) != (64, "bfloat16") and not {"unet", "value_residual"} & {*flags}:
        size["n_layer"] = 1  # the kernels are those of two
    if check.kind == "steps":
        flags.update(schedules(flags))
    if flags.get("constraint_names") and "constraint_layers" not in flags:
        flags["constraint_layers"] = [size["n_layer"] - 1]
    return GPTConfig(**{**size, **flags})


def switches(check):
    """How often a schedule changes what gets a gradient in five steps, for which a graph more is right."""
    return ("thaw_from" in TRAINING.get(check.entry, {})) + bool(settings(check).constraint_stop)


def schedules(flags):
    """Flags that have something move in each of five steps, of the mechanisms that are on."""
    more = {}
    if flags.get("unet"):
        more.update(unet_from=1, unet_ramp=3)
    if flags.get("constraint_names"):
        more.update(constraint_stop=2, constraint_warmup=3)
    return more


def trains_only(entry):
    """Whether an entry differs from another one in training alone."""
    return entry in TRAINING or entry.endswith(NO_LABELS) or entry.startswith(("checkpointed", "portions"))


@functools.cache
def uses_flex_attention(entry):
    """Whether an entry's training step computes attention by FlexAttention on a GPU."""
    model = GPT(settings(Check(entry, "train", 16)))
    return bool(model.needs_row_stats or model.config.window or model.changes_scores)


def checks(entries: Optional[tuple] = None):
    """Every Check of these entries; None: of all."""
    found = []
    for entry in entries or (*ENTRIES, MUON):
        if entry == MUON:
            found += [Check(MUON, "train", card=card) for card in CARDS]
            continue
        found.append(Check(entry, "steps"))
        if entry == "thaw":
            continue
        kinds = ("train",) if trains_only(entry) else ("train", "eval")
        found += [Check(entry, kind, card=card) for kind in kinds for card in CARDS]
        if entry in ALL_SIZES or entry in MECHANISMS and uses_flex_attention(entry):
            found += [Check(entry, "train", size, dtype, card) for card in CARDS
                      for size, dtype in [*((size, "bfloat16") for size in HEAD_SIZES),
                                          *((size, "float32") for size in (64, 128))]]
    return found


def more_checks(cards, entries: Optional[tuple] = None):
    """A training step of a few entries on each of some MORE_CARDS."""
    return [Check(entry, "train", dtype=MORE_CARDS[card], card=card) for card in cards
            for entry in entries or QUICK]


def quick_checks(entries: Optional[tuple] = None):
    """A few entries, head size 64 and bfloat16 alone, evaluation on one card."""
    return [check for check in checks(entries or QUICK) if check[2:4] == (64, "bfloat16")
            and (check.kind != "eval" or check.card == CARDS[0])]

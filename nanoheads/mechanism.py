"""
What a mechanism is: class Mechanism, with the flags, hooks and checks that each mechanism has. model.py has
those that come with the repository; a file of one's own is read by --mechanism=mine.py
(docs/your-own-mechanism.md).
"""

import copy
import functools
import typing
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, Optional

import torch
from torch import nn

# ---- flags: a field says what it is and which values it takes, and one function checks them all ----

# limit of a flag -> (its words in a message, whether a value keeps to it)
RANGES = {
    "at_least": ("at least", lambda value, limit: value >= limit),
    "above": ("above", lambda value, limit: value > limit),
    "below": ("below", lambda value, limit: value < limit),
    "at_most": ("at most", lambda value, limit: value <= limit),
}


def flag(default, help="", section="", at_least=None, above=None, below=None, at_most=None):
    """A dataclass field with a default, its line of --help, and a range: flag(4, "blocks", at_least=1).

    None is always allowed, and means that the value follows from other flags. section: a heading in --help,
    above this field and those after it.
    """
    metadata = dict(help=help, section=section, at_least=at_least, above=above, below=below, at_most=at_most)
    if isinstance(default, (list, dict)):  # each config gets one of its own
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def choices(cls):
    """{name: its values} of the fields of a dataclass whose type is a Literal, optional or not."""
    allowed = {}
    for name, hint in typing.get_type_hints(cls).items():
        for t in (hint, *typing.get_args(hint)):
            if typing.get_origin(t) is Literal:
                allowed[name] = typing.get_args(t)
    return allowed


def range_problems(config, names=None, options=None):
    """Yield a sentence for each flag of a config that is outside of its range or is none of its choices.

    names: the flags that are checked; None: all. options: the dataclass whose fields they are; None: the
    config's own.
    """
    allowed = choices(options or type(config))
    for f in fields(options or config):
        value = getattr(config, f.name)
        if value is None or names is not None and f.name not in names:
            continue
        if f.name in allowed and value not in allowed[f.name]:
            yield f"{f.name}={value!r} must be one of {', '.join(map(str, allowed[f.name]))}"
            continue
        limits = {key: f.metadata[key] for key in RANGES if f.metadata.get(key) is not None}
        broken = [f"{RANGES[key][0]} {limit}" for key, limit in limits.items()
                  if not RANGES[key][1](value, limit)]
        if broken:
            yield f"{f.name}={value!r} must be {' and '.join(broken)}"


def whole_groups(heads, size):
    """Whether head numbers form whole groups of this size; with size=2 these are 0 and 1, 2 and 3, ..."""
    return {h // size * size + i for h in heads for i in range(size)} == {*heads}


def plain_problems(config):
    """Yield a sentence for each of a plain GPT's flags that do not go together."""
    if config.n_head > 0 and config.head_dim is None and config.n_embd % config.n_head:
        yield f"n_embd={config.n_embd} must be a multiple of n_head={config.n_head}"
    elif config.n_head > 0 and config.pos == "rope" and config.head_size % 2:
        what = "n_embd/n_head" if config.head_dim is None else "head_dim"
        yield f"pos='rope' needs an even head size, {what}={config.head_size}"
    scaling = config.rope_scaling
    if scaling is not None and (len(scaling) != 4 or min(scaling) <= 0 or scaling[1] >= scaling[2]):
        yield f"rope_scaling={scaling} must be four numbers above 0: factor, low, high above low, context"
    if scaling is not None and config.pos != "rope":
        yield f"rope_scaling={scaling} needs pos='rope', not {config.pos!r}"
    if config.qk_scale and not config.qk_norm:
        yield "qk_scale=True needs qk_norm, whose scale it is"
    if config.n_kv_head and config.n_head % config.n_kv_head:
        yield f"n_kv_head={config.n_kv_head} must divide n_head={config.n_head}, into groups of heads"
    if config.qk_max is not None and not config.qk_norm:
        yield f"qk_max={config.qk_max} needs qk_norm, without which nothing bounds the logits"
    known_heads = range(config.n_head)
    if config.head_ids is not None and (
            len(config.head_ids) != config.n_layer
            or any(heads != sorted({*heads}.intersection(known_heads)) for heads in config.head_ids)):
        yield (f"head_ids={config.head_ids} must list, for each of the {config.n_layer} layers, "
               f"heads from 0 to {config.n_head - 1} in order")
    elif config.head_ids is not None and any(not whole_groups(h, config.unit) for h in config.head_ids):
        yield f"head_ids={config.head_ids} must list whole groups of {config.unit} heads, which go together"


# ---- a mechanism ----

# the constraints of the write-up, by which heads and labels are named
CONSTRAINTS = ["reciprocity", "testifiability", "decidability"]


class Uniform(NamedTuple):
    """An initial value for start_at(): uniform in (-bound, bound)."""

    bound: float


class Normal(NamedTuple):
    """An initial value for start_at(): normal around 0, with this standard deviation."""

    std: float


def start_at(parameter, value):
    """Declare the initial value of a parameter, and return the parameter.

    value: a number, a tensor, Normal or Uniform. TypeError for what is no parameter, such as a layer;
    ValueError for a value that does not fill it.

    A parameter of a mechanism keeps what its constructor fills in, so only two kinds need this: a random one,
    which the model draws from the seed and the parameter's name, and a weight of a plain layer (nn.Linear,
    nn.Embedding), which would otherwise start as in GPT-2.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"start_at() takes a parameter, such as self.proj.weight: not a "
                        f"{type(parameter).__name__}")
    if not isinstance(value, (Uniform, Normal)):
        shape = parameter.shape
        try:
            torch.as_tensor(value).expand(shape)
        except (RuntimeError, TypeError, ValueError):
            what = f"of the shape {[*value.shape]}" if torch.is_tensor(value) else repr(value)[:40]
            raise ValueError(f"start_at() fills a parameter of the shape {[*shape]} with a number, a tensor, "
                             f"Normal or Uniform, not with a value {what}") from None
    parameter.initial_value = value
    return parameter


@torch.no_grad()
def set_to(parameter, value, generator=None):
    """Set a parameter to an initial value, as start_at() takes it; a random one is drawn from generator."""
    if isinstance(value, Uniform):
        parameter.uniform_(-value.bound, value.bound, generator=generator)
    elif isinstance(value, Normal):
        parameter.normal_(0.0, value.std, generator=generator)
    else:
        parameter.copy_(torch.as_tensor(value))


class Outcome(NamedTuple):
    """What a GPT's forward pass has computed when its last block is done."""

    x: torch.Tensor                   # the final hidden states, [B, T, C]
    predictions: dict                 # "blocks.<i>.<name>" -> what hooks put into heads.predictions
    inputs: dict                      # name -> what GPT.forward() was given for a mechanism, or None
    positions: Optional[torch.Tensor]  # [B, T], as GPT.forward() takes them; None: a row is one text
    targets: Optional[torch.Tensor]   # [B, T], -1 where a token is not scored; None: there is no loss
    nats: Optional[torch.Tensor]      # loss of each token, [B, T], where a mechanism has needs_nats
    traces: Optional[dict]            # gets traces of the whole model; None: none are wanted


def no_dropout(config, flag):
    """Yield a sentence where attention dropout is on and `flag` needs a kernel without it."""
    if config.weight_dropout:
        yield (f"{flag} has no fused kernel with dropout on the attention weights: set attn_dropout=0 "
               "(and on what it is compared with)")


class Mechanism(nn.Module):
    """One change to the heads of a layer, built where its flag is on. A subclass overrides what it changes.

    A layer calls the hooks in the order in which they stand below, with itself (attn) and its heads in this
    forward pass (heads, a Heads of model.py). Any hook may put a gate, which is a factor on the heads'
    outputs, into heads.gates. A mechanism must not keep `attn`, because then two modules would contain each
    other. Weight decay does not act on its own parameters, and does act on matrices of layers inside it.
    """

    class Options:
        """Its flags, as annotated fields: the one that turns it on, then details, named <flag>_..."""

    name = ""                # the layer's attribute that holds it, and so the prefix of its parameters
    flag = ""                # the one of its Options that turns it on
    modes = {}               # name -> flags: its entries in MECHANISMS
    # mode -> {flag or parameter (* stands for any text): value} at which it equals the plain GPT; a mode that
    # is missing never does
    neutral = {}
    no_effect_because = ""   # a reason, if a model has the plain GPT's logits whatever its parameters are
    takes = ()               # arguments of GPT.forward() for it, which it finds in forward_pass.inputs
    # names of the RowStats that it reads in heads.row_stats: lse, entropy, log_p2, spread
    needs_row_stats = ()
    detaches_row_stats = False  # whether no gradient goes into those statistics, which makes them cheaper
    needs_positions = False  # whether it reads positions or n_keys of the forward pass
    needs_nats = False       # whether model_losses() reads the loss of each token
    # names of its tensors with a row for each head, which pruning slices, as in ("strength", "proj.weight");
    # or {name: HeadAxis of nanoheads/pruning.py}, where a head is not a single row of dim 0; None: its heads
    # depend on one another, so that none can be pruned
    per_head = ()

    # ---- flags ----

    def __init_subclass__(cls):
        if "Options" in vars(cls):
            cls.Options = dataclass(cls.Options)

    def __init__(self, config=None, attn=None):
        super().__init__()

    @classmethod
    def is_on(cls, config):
        """Whether a model of this config has the mechanism."""
        return getattr(config, cls.flag) not in (None, False)

    @classmethod
    def on(cls, config, layer):
        """Whether block `layer` has the mechanism."""
        return cls.is_on(config)

    @staticmethod
    def settle(config):
        """When a config is made: set the flags that follow from others."""

    @staticmethod
    def problems(config):
        """Yield a sentence for each thing that is wrong with its flags; asked where it is on."""
        return ()

    # ---- training ----

    def at_step(self, config, step):
        """Before a training step: set what depends on the number of the step."""

    # ---- the forward pass ----

    def before_projection(self, attn, heads):
        """Before queries, keys and values are projected: rewrite heads.x, the layer's normed input."""

    def after_projection(self, attn, qkv, heads):
        """After the projection, before QK-norm and RoPE: return qkv [B, T, 3 * H, D], rewritten."""
        return qkv

    def before_attention(self, attn, heads):
        """Before attention: rewrite heads.q, heads.k, heads.v; add gates and losses that need heads.x alone.

        What it puts into heads.for_later, later layers find in forward_pass.shared by the same name.
        """

    @property
    def changes_scores(self):
        """Whether score_mod() returns a function. A class overrides it where that depends on its flags."""
        return type(self).score_mod is not Mechanism.score_mod

    def score_mod(self, attn, heads):
        """The function (score, b, h, t, s) -> score that rewrites the attention scores; None: they stay.

        It has the signature of FlexAttention's score_mod. score is the scaled logit of query t for key s in
        row b and head h, before the softmax. The other arguments are integer tensors that broadcast against
        it, so a function indexes tensors with them, as in rate[h] or c[b, h, s], and computes with them, as
        in t - s. These tensors get gradients. On a GPU a function may index each of them only once; one that
        it needs twice, it captures as c and as -c. t and s count the columns read so far: with a cache the T
        queries are the last ones. The function acts on the layer's own heads.
        """
        return None

    def after_kernel(self, attn, heads, y, row_stats):
        """Right after the attention kernel, before any after_attention(): return the heads' outputs y
        [B, H, T, D] and the RowStats of another softmax. There are no attention weights to read.
        """
        return y, row_stats

    def after_attention(self, attn, heads):
        """After attention: rewrite heads.y; add gates that need heads.y, heads.v or heads.row_stats."""

    def trace_map(self, attn, weights, heads):
        """Where attention maps are traced: return the weights [B, H, T, S] as this mechanism changes them."""
        return weights

    # ---- the whole model ----

    @classmethod
    def model_modules(cls, config):
        """{attribute of the GPT: module} of its modules outside of the layers, which model_losses() uses."""
        return {}

    @classmethod
    def model_losses(cls, model, outcome):
        """After the last block: {name: weighted loss} of an Outcome. It is called for classes that are off,
        too.
        """
        return {}


class BetweenBlocks(Mechanism):
    """A mechanism of the whole model, which acts between its blocks. It is built as cls(config)."""

    def before_block(self, x, layer, outputs, shared):
        """The input of block `layer`, or at n_layer of the last norm, in place of the residual stream x
        [B, T, C].

        outputs: the embedding and the outputs of the blocks before, of which x is the last, as other
        mechanisms between blocks have changed it. shared: a dict for what later blocks read.
        """
        return x


class AddedHeads(Mechanism):
    """A mechanism that adds heads to a layer, behind the layer's own. Its score function acts on all heads.
    """

    @classmethod
    def added_heads(cls, config, layer):
        """How many heads it adds to those of block `layer`."""
        raise NotImplementedError

    @classmethod
    def head_size_in(cls, config, layer):
        """The head size of block `layer` with these heads; None: the mechanism does not change it."""

    def merge_added(self, out, y):
        """out [B, T, C], the merged output of the layer's own heads, plus that of the added heads' outputs y
        [B, added heads, T, D].
        """
        raise NotImplementedError


def flags_of(cls):
    """The names of the fields that a mechanism's class has in GPTConfig."""
    return [f.name for f in fields(cls.Options)]


def flag_problems(cls, config):
    """Yield a sentence for each thing that is wrong with the flags of a mechanism's class. That includes
    details of a mechanism that is off, and attention dropout, with which no kernel gives row statistics.
    """
    if cls.is_on(config):
        yield from [*range_problems(config, options=cls.Options)] or cls.problems(config)
        if cls.needs_row_stats:
            yield from no_dropout(config, cls.flag)
        return
    for f in fields(cls.Options):
        value = getattr(config, f.name)
        if f.name != cls.flag and value != f.default:
            yield f"{f.name}={value!r} means nothing while {cls.flag} is off"

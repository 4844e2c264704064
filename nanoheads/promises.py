"""
Tries on a small model what every mechanism promises, such as not to look ahead (train.py --check). It takes
ten seconds or so for each mechanism.

    python train.py --mechanism=mine.py --check       # a mechanism in a file of one's own, or any by its name

acts      with every weight off its start, or after passes in training, not the logits of the plain GPT
causal    changing a token changes no logit before it      rows     ... nor one of another row of the batch
cache     token by token as all at once                    padding  before a row changes nothing
pruned    a head removed is a head whose gate is 0         learns   a finite gradient for each parameter
grouped   heads that share keys are heads with copies      dtypes   float32 as float64; bfloat16 is finite
neutral   where it says so, the logits of the plain GPT    documents  a document before another one in a row
                                                                      changes nothing of it

--check also tries causal and rows at the size of a run with the same command line, or of tiny if that names
no scale, as nanoheads/causality.py does. Before a study of a mechanism of one's own compare.py tries all of
them, and refuses one that does not run, does not act, is not causal or mixes rows. Before a run trains a new
mechanism, also in a study, it tries causal and rows at its own size, and prints a line where cache is broken.
"""

import copy
import math
from dataclasses import replace

import torch

from model import ALL_ON, GPT, MECHANISM_CLASSES, MECHANISMS, NEUTRAL, GPTConfig, KVCache
from nanoheads import causality, configurator, own_mechanism
from nanoheads.causality import Perturbation
from nanoheads.class_checks import tensors_of, try_hooks
from nanoheads.common import UserError, fault_of_own_file, pick_device, table, writable, write_json
from nanoheads.config import flags_by_name
from nanoheads.mechanism import flags_of
from nanoheads.neutral import make_neutral
from nanoheads.optim import added_parameters
from nanoheads.pruning import HeadAxis, head_axes, prune_heads

SIZES = dict(vocab_size=37, block_size=16, n_layer=2, n_head=4, n_embd=64, seed=1)
T = 13
LONG = 256  # tokens on which a mechanism has to act, since some act on distant tokens alone
NEEDED = ("runs", "acts", "causal", "rows")  # where one of these is broken, a comparison means nothing


def tokens(seed, *shape):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def random_model(flags, recipe, random=True, **sizes):
    """A GPT in float64; random: every parameter is drawn, so that nothing is hidden behind a zero."""
    model = GPT(GPTConfig(**{**SIZES, **sizes}, recipe=recipe, **flags)).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters() if random else ():
            p.copy_(0.15 * torch.randn(p.shape, generator=generator) + (p.dim() < 2))
    return model


def logits_of(model, idx):
    """Logits with the same noise each time, where a mechanism draws some."""
    torch.manual_seed(3)
    return model(idx).logits


def far(a, b):
    """The largest difference; infinite where something is not a number."""
    return (a - b).abs().nan_to_num(math.inf).amax().item()


# ---- the promises: each function returns what is wrong, in words, or None ----

def perturbations(model):
    """Yield ("in training" or "when evaluated", a Perturbation of the model's logits) of both modes.

    Each batch is given to a new copy, since a forward pass in training may change a buffer for the next one.
    """
    def ask(ids):
        return logits_of(copy.deepcopy(model), ids)

    idx = tokens(1, 2, T)
    for training in (False, True):
        model.train(training)
        yield ("in training" if training else "when evaluated",
               Perturbation(ask, idx, (idx + 5) % SIZES["vocab_size"], 1e-9))


@torch.no_grad()
def causal(model, plain):
    for when, perturbation in perturbations(model):
        for ahead in perturbation.find_ahead([[t, t] for t in range(T - 1, 0, -1)]):
            return f"it looks ahead: {ahead} ({when})"


@torch.no_grad()
def rows(model, plain):
    for when, perturbation in perturbations(model):
        if wrong := perturbation.find_mixed_rows():
            return f"{wrong} ({when})"


@torch.no_grad()
def cache(model, plain):
    idx, kv_cache = tokens(1, 2, T), KVCache(model.config)
    want = model.hidden(idx)
    got = torch.cat([model.hidden(piece, kv_cache) for piece in idx.split([5, 1, 1, 6], 1)], 1)
    if (off := far(got, want)) > 1e-9:
        return f"with a cache the hidden states are off by {off:.1e}"


def note_on_cache(config, classes):
    """A line where mechanisms of these classes, with a GPTConfig's flags, differ with a cache; else None."""
    flags = {key: getattr(config, key) for cls in classes for key in flags_of(cls)}
    try:
        with torch.random.fork_rng(devices=[]):
            wrong = cache(random_model(flags, config.recipe), None)
    except Exception:  # they cannot be so small, or have another fault, which training will show
        return None
    return wrong and (f"Note: {', '.join(cls.__name__ for cls in classes)}: {wrong}. Training and scores use "
                      "none, but what is sampled will be wrong (promise 'cache' of train.py --check)")


@torch.no_grad()
def padding(model, plain):
    idx = tokens(1, 1, T)
    want = model.hidden(idx[:, 4:])
    got = model.hidden(idx, pad=torch.tensor([4]))[:, 4:]
    if (off := far(got, want)) > 1e-9:
        hint = POSITIONS if model.changes_scores else ""
        return f"after 4 tokens of padding the hidden states are off by {off:.1e}{hint}"


@torch.no_grad()
def documents(model, plain):
    """Two other documents are put before the same one in its row."""
    idx = tokens(1, 2, T - 5)
    want, first = model.hidden(idx), tokens(2, 2, 5)
    positions = torch.cat((torch.arange(5), torch.arange(T - 5))).expand(2, -1)
    behind = [model.hidden(torch.cat((before, idx), 1), positions=positions)[:, 5:]
              for before in (first, (first + 5) % SIZES["vocab_size"])]
    if (off := far(*behind)) > 1e-9:
        return f"a document changes with the one before it in its row, its hidden states by {off:.1e}{BEGINS}"
    if (off := far(behind[0], want)) > 1e-9:
        return f"behind another document in its row the hidden states of one are off by {off:.1e}{BEGINS}"


POSITIONS = ("; t and s of a score function are columns, padding included: what depends on more than t - s "
             "reads heads.forward_pass.positions, in a class with needs_positions = True")
BEGINS = ("; where a row holds several documents, forward_pass.begins [B, T] is the column at which the "
          "document of each token begins, else None, and forward_pass.positions counts from there")


@torch.no_grad()
def pruned(model, plain):
    idx, gone = tokens(1, 2, T), {0: [1], 1: [0, 2]}
    if model.config.unit > 1:  # heads of a pair go together
        gone = {0: [*range(model.config.unit)], 1: [*range(model.config.unit, 2 * model.config.unit)]}
    for layer, heads in gone.items():
        for head in heads:
            model.set_gate(layer, head, 0.0)
    want = model(idx).logits
    prune_heads(model, gone)
    if (off := far(model(idx).logits, want)) > 1e-9:
        n = sum(map(len, gone.values()))
        return f"without {n} heads the logits are off by {off:.1e} from those with their gates at 0"


HIDDEN = ("; a score function is also computed where s > t, and what it gives there is thrown away, but must "
          "be finite: (t - s).clamp_min(0) in place of t - s, say")


def with_added_heads(flags, recipe):
    """A model with these flags and constraint heads in both blocks; None where they do not go together."""
    added = {**flags, "constraint_names": ["a"], "constraint_layers": [0, 1]}
    fits = "constraint_names" not in flags and not GPTConfig(**SIZES, recipe=recipe, **added).problems()
    return random_model(added, recipe) if fits else None


def declared(model, plain):
    """Each tensor that per_head names has rows for the layer's own heads, or for all heads, which then all
    get a gradient. model: with_added_heads().
    """
    if model is None:
        return None
    try:
        out = model.train()(tokens(1, 2, T), tokens(2, 2, T))
    except RuntimeError as e:
        return (f"beside a constraint head it does not run: {' '.join(str(e).split())[:200]}; a gate, and "
                "all else that acts on the outputs, is of attn.n_total heads")
    sum(out.aux.values(), out.loss).backward()
    for attn in (block.attn for block in model.transformer.h):
        for module, name, axis in head_axes(attn):
            t = getattr(module, name, None)
            if module is attn or t is None or axis.parts > 1 or axis.shared:
                continue
            where = f"{name} of {type(module).__name__}"
            if t.size(axis.dim) not in (attn.n_head * axis.size, attn.n_total * axis.size):
                return (f"{where} has {t.size(axis.dim)} rows beside a constraint head, and must have "
                        "attn.n_head, or attn.n_total, which counts constraint heads")
            if t.size(axis.dim) == attn.n_total * axis.size and t.grad is not None:
                of_added = t.grad.narrow(axis.dim, attn.n_head * axis.size, attn.n_extra * axis.size)
                if not of_added.any() and t.grad.any():
                    return (f"{where} has rows for constraint heads, which learn nothing: it acts on the "
                            "layer's own heads alone, so that it needs attn.n_head of them")


def learns(model, plain):
    """A model with a longer block_size reads a longer text, for parameters that act on distant tokens alone.
    """
    length = min(model.config.block_size, LONG - 1) if model.config.block_size > SIZES["block_size"] else T
    idx, targets = tokens(1, 2, length), tokens(2, 2, length)
    labels = {name: (tokens(3, 2, length) % 2).to(model.lm_head.weight.dtype)
              for name in model.config.constraint_names or ()}
    out = model.train()(idx, targets, **(dict(constraint_targets=labels) if labels else {}))
    if not out.loss.isfinite():
        return "the loss is not finite" + HIDDEN * model.changes_scores
    sum(out.aux.values(), out.loss).backward()
    for name in sorted(added_parameters(model)):
        grad = model.get_parameter(name).grad
        if grad is None or not grad.any():
            return f"{name} has no gradient"
        if not grad.isfinite().all():
            return f"the gradient of {name} is not finite" + HIDDEN * model.changes_scores


@torch.no_grad()
def grouped(model, plain):
    """A model whose heads share keys and values in pairs computes what one with a copy for each head does."""
    copies = GPT(replace(model.config, n_kv_head=None)).double().eval()
    weights, c = model.state_dict(), model.config
    for name in [name for name in weights if ".attn.c_attn." in name]:
        size = model.get_submodule(name.partition(".c_attn.")[0]).head_size
        q, k, v = weights[name].split([n * size for n in (c.n_head, c.n_kv_head, c.n_kv_head)])
        k, v = (t.unflatten(0, (c.n_kv_head, -1)).repeat_interleave(c.group, 0).flatten(0, 1) for t in (k, v))
        weights[name] = torch.cat((q, k, v))
    if any(weights[name].shape != t.shape for name, t in copies.state_dict().items()):
        return None  # a mechanism has tensors for each key and value head, of which there are no copies
    copies.load_state_dict(weights)
    idx = tokens(1, 2, T)
    if (off := far(logits_of(model, idx), logits_of(copies, idx))) > 1e-9:
        return f"with n_kv_head=2 the logits are off by {off:.1e} from those with copies for each head"
    return cache(model, plain)


def dtypes(model, plain):
    idx, targets = tokens(1, 2, T), tokens(2, 2, T)
    want = logits_of(model, idx).detach()
    off = far(logits_of(model.float(), idx).detach(), want) / far(want, 0)
    if off > 1e-3:
        return f"in float32 the logits are off by {off:.1e} of the largest"
    with torch.autocast("cpu", torch.bfloat16):
        out = model.train()(idx, targets, logits=True)
    sum(out.aux.values(), out.loss).backward()
    if not out.logits.isfinite().all():
        return "in bfloat16 the logits are not finite"
    for name, p in model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            return f"in bfloat16 the gradient of {name} is not finite"


@torch.no_grad()
def neutral(model, plain):
    """model: at_neutral(). It gets the weights of the plain GPT."""
    idx = tokens(1, 2, T)
    model.load_state_dict({**model.state_dict(), **plain.state_dict()})
    if (off := far(model(idx).logits, plain(idx).logits)) > 1e-9:
        return f"at its neutral setting the logits are off by {off:.1e} from the plain GPT's"


def runs(model, plain):
    """This is tried first, and is in the table only where it fails, since every promise would fail so."""
    try_hooks(copy.deepcopy(model), causality.untried_classes(model.config))
    if wrong := learns(model, plain):
        return wrong if "loss is not finite" in wrong else None
    with torch.no_grad():  # all logits, since the loss may be finite without some of them
        if not logits_of(model.eval(), tokens(1, 2, T)).isfinite().all():
            return "the logits are not finite" + HIDDEN * model.changes_scores


def acts(model, plain):
    """model: random_model(). It gets the weights of the plain GPT where that has them."""
    weights = model.state_dict()
    shared = {name: t for name, t in plain.state_dict().items()
              if name in weights and weights[name].shape == t.shape}
    model.load_state_dict({**weights, **shared})
    # a buffer that training fills, or a share that grows with the steps, may be 0 in a new model
    if differs(model, plain) or differs(trained(trained(model, 0), 10 ** 6), plain):
        return None
    return (f"it does nothing: with noise on all its parameters the logits of {LONG} tokens are those of the "
            "plain GPT, in training and when evaluated")


@torch.no_grad()
def differs(model, plain):
    """Whether a model has other logits than the plain GPT, or a loss of its own, by which it may act alone.
    """
    idx = tokens(1, 4, LONG)
    for training in (False, True):
        torch.manual_seed(3)
        out = model.train(training)(idx, tokens(2, 4, LONG), logits=True)
        want = plain.train(training)(idx).logits
        if far(out.logits, want) > 1e-9 or any(loss.any() for loss in out.aux.values()):
            return True
    return False


def trained(model, step):
    """A model of block_size LONG after a forward pass of this training step. Its parameters stay."""
    model.train().at_step(step)
    model(tokens(4, 4, LONG), tokens(5, 4, LONG))
    return model


PROMISES = (causal, rows, cache, padding, documents, pruned, learns, dtypes)


def check(name, flags):
    """Yield (mode, recipe, promise, what is wrong or None) for one of MECHANISMS.

    Where it does not run at all, there is one such tuple, for "runs". Where its class says why it has no
    effect, acts is not tried, and where it says that heads depend on one another, pruned is not.
    """
    may_be_idle = any(cls.flag in flags and cls.no_effect_because for cls in MECHANISM_CLASSES)
    is_joined = any(cls.flag in flags and cls.per_head is None for cls in MECHANISM_CLASSES)
    for recipe in ("gpt2", "modern"):
        config = GPTConfig(**SIZES, recipe=recipe, **flags)
        if bad := config.problems():
            raise UserError(f"{name}: {'; '.join(bad)}")
        if wrong := broken(runs, lambda: random_model(flags, recipe)):
            yield name, recipe, "runs", wrong
            return
        if not may_be_idle:
            plain = random_model({}, recipe, block_size=LONG)
            wrong = broken(acts, lambda: random_model(flags, recipe, block_size=LONG), plain)
            yield name, recipe, "acts", wrong
        for promise in PROMISES:
            if promise is pruned and is_joined:
                continue
            wrong = broken(promise, lambda: random_model(flags, recipe))
            if promise is learns and wrong and "no gradient" in wrong:
                wrong = broken(promise, lambda: trained(
                    random_model(flags, recipe, block_size=LONG), 10 ** 6))
            if promise is pruned:
                wrong = wrong or broken(declared, lambda: with_added_heads(flags, recipe))
            if wrong and promise is pruned:
                wrong += f"; {how_to_declare(flags, recipe)}"
            yield name, recipe, promise.__name__, wrong
        if not GPTConfig(**SIZES, recipe=recipe, n_kv_head=2, **flags).problems():
            wrong = broken(grouped, lambda: random_model(flags, recipe, n_kv_head=2))
            yield name, recipe, "grouped", wrong
        # a neutral setting belongs to the mode's own flags
        if name in NEUTRAL and all(MECHANISMS[name].get(key) == value for key, value in flags.items()):
            yield name, recipe, "neutral", broken(neutral, lambda: at_neutral(name, flags, recipe),
                                                  random_model({}, recipe))


def how_to_declare(flags, recipe):
    """A hint, in words: what to write into a mechanism's class so that pruning slices its tensors."""
    advice = []
    for cls, (axes, declared_names) in tensors_with_heads(flags, recipe).items():
        if set(axes) <= declared_names:
            continue
        names = ", ".join(f'"{name}"' for name in axes)
        code = f"per_head = ({names},)" if len(axes) == 1 else f"per_head = ({names})"
        where = f"in class {cls.__name__} `{code}`"
        if any(axis != HeadAxis() for axis in axes.values()):
            code = ", ".join(f'"{name}": {code_of(axis)}' for name, axis in axes.items())
            where = (f"`from nanoheads.pruning import HeadAxis`, and at the end of {cls.__name__}.__init__ "
                     f"`self.per_head = {{{code}}}`")
        advice.append(f"write {where}")
    return "; ".join(advice) or ("where heads depend on one another, write `per_head = None` in the class, "
                                 "and none is pruned; else name each tensor with a row for each head in it")


def tensors_with_heads(flags, recipe):
    """{class of a mechanism: ({tensor with rows for each head: HeadAxis}, the names in its per_head)}.

    A tensor has rows for each head if it is larger in a model of more heads.
    """
    sizes = dict(SIZES, recipe=recipe, head_dim=SIZES["n_embd"] // SIZES["n_head"], **flags)
    by_class = {}
    try:
        small, large = (GPT(GPTConfig(**{**sizes, "n_head": n_head}))
                        for n_head in (SIZES["n_head"], SIZES["n_head"] + 2))
    except Exception:  # sizes that the mechanism does not go with
        return by_class
    for attn, larger in zip(*([block.attn for block in model.transformer.h] for model in (small, large))):
        for m in attn.mechanisms():
            axes, names = by_class.setdefault(type(m), ({}, set()))
            names.update(m.per_head or ())
            of_larger = dict(tensors_of(larger.get_submodule(m.name)))
            for name, t in tensors_of(m):
                grown = [dim for dim in range(t.dim()) if t.size(dim) != of_larger[name].size(dim)]
                if len(grown) == 1:
                    dim = grown[0]
                    axes[name] = HeadAxis(dim, (of_larger[name].size(dim) - t.size(dim)) // 2)
    return by_class


def code_of(axis):
    """The Python code of a HeadAxis."""
    details = [f"dim={axis.dim}"] * (axis.dim > 0) + [f"size={axis.size}"] * (axis.size > 1)
    return f"HeadAxis({', '.join(details)})"


def at_neutral(name, flags, recipe):
    """The model of a mode at its neutral setting, everything else drawn at random."""
    sizes = GPTConfig(**SIZES)
    keys = {key: getattr(sizes, value) if isinstance(value, str) else value
            for key, value in NEUTRAL[name].items() if key in GPTConfig.defaults()}
    model = random_model({**flags, **keys}, recipe, random=False)
    make_neutral(model, [name])
    return model


def broken(promise, build, plain=None):
    """What is wrong with a promise for the model that build() makes, in words; None: nothing."""
    try:
        return promise(build(), plain)
    except UserError as e:
        return str(e)
    except Exception as e:  # a mechanism of one's own may raise anything
        return fault_of_own_file(e) or f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def at_size(model_config, config):
    """What causal and rows find in a GPTConfig's model, at a TrainConfig's batch size and dtype, or None."""
    model_config = replace(model_config, vocab_size=256)  # bytes, since the run's text is not read here

    def promise(new, plain):
        return causality.leak_in(new, causality.modes_of(new, config.batch_size, config.dtype), step=0)[0]
    return broken(promise, lambda: causality.with_noise(GPT(model_config).to(pick_device("auto"))))


def configs_of(command):
    """(scale or None, TrainConfig, {name of a mechanism: (GPTConfig, flags of that mechanism alone)}) of
    train.py's Command, with each of its mechanisms turned on by itself. UserError: a config is invalid.
    """
    named, configs = flags_by_name(), {}
    if not (command.files or "scale" in command.values()):
        command = command.with_arguments(scale="tiny")
    names = command.names().get("mechanism", [])
    for name in names or [None]:
        alone = command.with_arguments(mechanism=name) if name else command
        (model_config, config), values = configurator.build_configs(alone, mechanisms=named)
        configurator.validate((model_config, config))
        flags = {**MECHANISMS, "all_on": ALL_ON}.get(name, {})
        details = {key for cls in MECHANISM_CLASSES if cls.flag in flags for key in flags_of(cls)}
        configs[name] = model_config, {key: values[key] for key in values if key in flags or key in details}
    if not names:
        raise UserError("--check: name a mechanism: --mechanism=mine.py, or one of the repository's")
    return command.values().get("scale"), config, configs


def main(command):
    """Print a table of the promises of the mechanisms that train.py's Command names. UserError: one is
    broken.
    """
    scale, config, configs = configs_of(command)
    if config.json:
        writable(config.json)
    results = []
    for name, (model_config, flags) in configs.items():
        tried = [*check(name, flags)]
        results += tried
        if not any(promise == "runs" for _, _, promise, _ in tried):  # where it runs
            size = f"of {scale}" if scale else "as set"
            results.append((name, size, "causal, rows", at_size(model_config, config)))
    if config.json:
        write_json(config.json, [dict(mechanism=name, recipe=recipe, promise=promise, broken=wrong or None)
                                 for name, recipe, promise, wrong in results])
    lines = [(*row[:3], row[3] or "kept") for row in results]
    print(table(("mechanism", "recipe", "promise", ""), lines, left=4))
    if wrong := [row for row in results if row[3]]:
        raise UserError(f"{len(wrong)} of {len(results)} promises are broken")


def refuse_broken(variants):
    """[a line for each other broken promise]; UserError where a mechanism of one's own does not run, does
    nothing, looks ahead or mixes rows.

    variants: {name: flags}; those that turn a mechanism of one's own on are tried.
    """
    notes = {}
    for name, flags in variants.items():
        of_own = {key: value for cls in own_mechanism.FILES if isinstance(flags, dict) and flags.get(cls.flag)
                for key, value in flags.items() if key in flags_of(cls)}
        for _, recipe, promise, wrong in check(name, of_own) if of_own else ():
            if wrong and promise in NEEDED:
                raise UserError(f"{name} (recipe={recipe}): {wrong}: a comparison would mean nothing")
            if wrong:  # one line is enough where it is broken in both recipes
                words = f"Note: {name!r} is compared all the same, although {wrong}"
                notes.setdefault((name, promise), f"{words} (promise {promise!r} of train.py --check)")
    return [*notes.values()]

"""
Measures what each head of a model does on a given text, once or all through a run, and what the model does
with some of them closed. Nothing here touches the training step.
"""

import math
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch.nn import functional as F

from model import KVCache
from nanoheads.common import UserError
from nanoheads.optim import keys_of_rates, precision
from nanoheads.pruning import constant_gate
from nanoheads.tasks import TaskData

# what measure() gives of every head
METRICS = {
    "entropy": "of its attention rows, over the log of the row's length: 0 one key, 1 all equal",
    "gradient": "norm of the loss's gradient in the head's slices of the projections, nats",
    "importance": "|y . d loss / d y| a sequence, its output times the gradient there, nats a token",
    "utilisation": "share of the layer's output norm",
    "gate": "mean over tokens of all factors on its output",
    "conflict": "cosine of its gradients on two halves of the text",
}
# averages that stand still while a head is withdrawn: it sends nothing, so that all of these would read 0
STAND_STILL = ("load", "importance", "gradient", "conflict")


def in_float64(tensor):
    """A tensor in float64: on its device, or on the CPU where that is a Mac's GPU, which has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def attentions(model):
    return [block.attn for block in model.transformer.h]


def constant_gates(model):
    """[a tensor [H] a block]: the product of each head's gates that depend on no text; 1: it has none."""
    gates = [constant_gate(attn) for attn in attentions(model)]
    return [attn.c_proj.weight.new_ones(attn.n_total) if gate is None else gate.detach()
            for attn, gate in zip(attentions(model), gates)]


@torch.no_grad()
def cache_bytes(model):
    """Bytes that keys and values of a full context take."""
    cache = KVCache(model.config)
    model.hidden(torch.zeros(1, 1, dtype=torch.long, device=model.transformer.wte.weight.device), cache)
    return sum(t.numel() * t.element_size() for t in [*cache.k, *cache.v] if t is not None)


def head_ids(model):
    """[a list a block] of the original numbers of all heads, constraint heads too."""
    return [attn.all_head_ids() for attn in attentions(model)]


def all_heads(model):
    """[(layer, head)] of every head, constraint heads too, by the original numbers."""
    return [(layer, head) for layer, numbers in enumerate(head_ids(model)) for head in numbers]


# ---- text to measure on ----

def even_starts(tokens, n, length):
    """First tokens [n] of pieces of a text, evenly spaced, each with one token behind it, its last target."""
    return np.linspace(0, len(tokens) - length - 1, n).astype(np.int64)


def ids_at(tokens, starts, length):
    """The ids [n, length] that stand in a text from these starts on."""
    return torch.from_numpy(np.stack([tokens[s:s + length] for s in starts]).astype(np.int64))


def fixed_text(data, split, block_size, n_tokens, rank=0, world=1):
    """(x, y) [B, T] each, evenly spaced windows of a split, always the same; a rank gets its share.

    Of a task rows of all levels of training, where nothing is asked with -1 in y. At least two windows a
    rank. UserError where the split has not as many.
    """
    if isinstance(data, TaskData):
        n = max(2, n_tokens // data.length // world) * world
        return tuple(t[rank::world] for t in data.mixed_rows(split, n))
    tokens = data.tokens(split)
    n = max(2, n_tokens // block_size // world) * world
    if len(tokens) < n * block_size + 1 or block_size < 2:
        raise UserError(f"measuring heads takes {n} windows of {max(2, block_size)} tokens; "
                        f"{data.dir} has {len(tokens):,} tokens of {split}, block_size={block_size}")
    ids = ids_at(tokens, even_starts(tokens, n, block_size)[rank::world], block_size + 1)
    return ids[:, :-1], ids[:, 1:]


@contextmanager
def inputs_of(modules):
    """A list of each module's last input, filled by forward passes meanwhile."""
    inputs = [None] * len(modules)

    def keep(i):
        def hook(module, args):
            inputs[i] = args[0]
        return hook

    hooks = [module.register_forward_pre_hook(keep(i)) for i, module in enumerate(modules)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def evaluating(model):
    """The model in eval mode, and then as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def nats_on(model, x, y, autocast=None, rows=16):
    """Mean nats per token of y after x, [B, T] each, dropout off; of a task's rows, an answer of each batch.
    """
    total = 0.0
    with evaluating(model), autocast or nullcontext():
        for xs, ys in zip(x.split(rows), y.split(rows)):
            total += model(xs, ys).loss.item() * len(xs)
    return total / len(x)


# ---- metrics ----

def measure(model, x, y, autocast=None):
    """{metric: [a float64 tensor [H] a block]} of METRICS on x, y [B, T], B and T at least 2, in eval mode.

    Importance is Michel et al.'s (arXiv 1905.10650, eq. 2). Raises ValueError where one is not finite.
    """
    layers, texts = attentions(model), list(zip(x.chunk(2), y.chunk(2)))
    if len(texts) < 2 or x.size(1) < 2:
        raise ValueError(f"measuring heads takes two sequences of two tokens, not {tuple(x.shape)}")
    halves, weights = [], [w for attn in layers for w in projections(attn)]
    outs = [p for attn in layers for p in out_projections(attn)]
    with inputs_of(outs) as ys_of, evaluating(model), torch.enable_grad():
        for xs, ys in texts:
            with autocast or nullcontext():
                out = model(xs, ys, traces=True)
            grads = torch.autograd.grad(out.loss, [*weights, *ys_of], allow_unused=True)
            grads = [torch.zeros_like(t) if g is None else g for t, g in zip([*weights, *ys_of], grads)]
            halves.append(measure_half(model, out.traces, grads, ys_of))
    return combine_halves(halves)


def combine_halves(halves):
    """{metric: [a float64 tensor [H] a block]} from what measure_half() gives of each half of a text.

    The metrics are means over the halves.
    """
    metrics = {name: [] for name in METRICS}
    for a, b in zip(*halves):
        mean = {name: (a[name] + b[name]) / 2 for name in a}
        mean.update(gradient=mean["slope"].norm(dim=-1), utilisation=share_of_layer(mean),
                    conflict=F.cosine_similarity(a["slope"], b["slope"], dim=-1, eps=1e-30))
        for name in METRICS:
            metrics[name].append(mean[name])
    for name, values in metrics.items():
        for layer, value in enumerate(values):
            if not value.isfinite().all():
                raise ValueError(f"{name} of a head in block {layer} is not finite")
    return metrics


def share_of_layer(mean):
    """[H]: the norm of what each head sends, over the sum of its layer's."""
    norms = mean["power"].clamp_min(0).sqrt()
    return norms / norms.sum().clamp_min(1e-30)


def projections(attn):
    """The weights that are a head's own: into q, k, v and out, of the layer's heads and constraint heads."""
    weights = [attn.c_attn.weight, attn.c_proj.weight]
    return weights + ([attn.constraint.c_attn.weight, attn.constraint.c_proj.weight] if attn.n_extra else [])


def out_projections(attn):
    return [attn.c_proj] + ([attn.constraint.c_proj] if attn.n_extra else [])


def rows_of_heads(weight, n, count, size):
    """[n, ...]: the rows of a projection [.., C] to q, k and v (count: 3; 1: q) that each of n heads uses."""
    rows = weight.reshape(-1, size * weight.size(1))
    if count > 1 and n:  # keys and values may be shared by groups of heads
        shared = rows[n:].unflatten(0, (count - 1, -1))
        rows = torch.cat((rows[:n][None], shared.repeat_interleave(n // shared.size(1), 1)))
    return rows.view(count, n, rows.size(-1)).transpose(0, 1).flatten(1)


def measure_half(model, traces, grads, outputs):
    """A dict of [H] tensors a block, from gradients of projections() and of what goes into c_proj."""
    layers, rows, T = attentions(model), [], outputs[0].size(1)
    slopes, grads, outputs = iter(grads[:-len(outputs)]), iter(grads[-len(outputs):]), iter(outputs)
    for layer, attn in enumerate(layers):
        row = dict(slope=[], power=[], importance=[])
        groups = [(attn.n_head, attn.parts, attn.c_proj)]
        if attn.n_extra:
            groups.append((attn.n_extra, 3, attn.constraint.c_proj))
        for n, count, out in groups:
            D = attn.head_size
            slope_in, slope_out = in_float64(next(slopes)), in_float64(next(slopes))
            qkv_rows = rows_of_heads(slope_in, n, count, D)
            out_rows = slope_out.view(len(slope_out), n, D).transpose(0, 1).flatten(1)
            row["slope"].append(torch.cat((qkv_rows, out_rows), 1))
            y, g = (in_float64(next(tensors).detach()).unflatten(-1, (n, D)) for tensors in (outputs, grads))
            # the loss is a mean over sequences: times their number, a sequence's own
            row["importance"].append((y * g).sum((1, 3)).abs().mean(0) * len(y))
            weight = in_float64(out.weight.detach()).view(len(slope_out), n, D)
            gram = torch.einsum("cnd,cne->nde", weight, weight)
            row["power"].append(torch.einsum("btnd,nde,btne->n", y, gram, y) / (y.size(0) * y.size(1)))
        row = {name: torch.cat(values) for name, values in row.items()}
        block_traces = {key.split(".", 2)[2]: t for key, t in traces.items()
                        if key.startswith(f"blocks.{layer}.")}
        positions = torch.arange(T, device=model.transformer.wte.weight.device)
        n_keys = in_float64(model.mask_of(layer).n_keys(positions))
        has_entropy = n_keys > 1  # a row of one key has no entropy to speak of
        entropy = in_float64(block_traces["entropy"].detach())[..., has_entropy] / n_keys[has_entropy].log()
        row["entropy"] = entropy.mean((0, 2))
        row["gate"] = mean_gate(attn, block_traces)
        rows.append(row)
    return rows


def mean_gate(attn, traces):
    """[H]: the mean over tokens of the product of all that multiplies a head's output.

    Of constraint heads as published, what multiplies their values; a gate on their scores is no factor.
    """
    gate = in_float64(attn.c_proj.weight.new_ones(1, attn.n_total, 1, 1))
    for name, trace in traces.items():
        if name.startswith("gates."):
            gate = gate * in_float64(trace.detach())
    if "router_gates" in traces and attn.constraint.gate_on == "value":
        values = F.pad(in_float64(traces["router_gates"].detach()), (attn.n_head, 0), value=1.0)
        gate = gate * values.transpose(1, 2)[..., None]
    return gate.mean((0, 2, 3))


# ---- gates set by hand, for a while ----

@contextmanager
def gates_by_hand(model, gates):
    """The model with these gates set by hand, {layer: [H] or None}, and then as it was."""
    layers = attentions(model)
    gates_before = [attn.gate_by_hand for attn in layers]
    try:
        for layer, gate in gates.items():
            layers[layer].gate_by_hand = gate
        yield
    finally:
        for attn, gate in zip(layers, gates_before):
            attn.gate_by_hand = gate


@contextmanager
def closed(model, heads):
    """The model with these (layer, head) at gate 0, and then as it was."""
    copies = {layer: attn.gate_by_hand.clone() for layer, attn in enumerate(attentions(model))
              if attn.gate_by_hand is not None}
    with gates_by_hand(model, copies):
        for layer, head in heads:
            model.set_gate(layer, head, 0.0)
        yield


# ---- measurements all through a run ----

class Metrics:
    """What has been measured of a run's heads.

    Arrays are [blocks, heads] by the original numbers, NaN: gone. latest: {metric: array}, of the last
    measurement. mean: the moving averages, see add(). withdrawn: the heads that send nothing because
    agency's factor is 0.
    """

    def __init__(self, shape):
        self.shape, self.mean, self.latest = shape, {}, {}
        self.withdrawn = np.full(shape, False)

    @property
    def is_present(self):
        """Which heads the model still has."""
        return np.isfinite(self.latest["gate"])

    def spread(self, values, ids):
        """[a tensor [H] a block] -> an array, by their numbers, [a list a block]."""
        array = np.full(self.shape, math.nan)
        for layer, (numbers, value) in enumerate(zip(ids, values)):
            array[layer, numbers] = value.cpu().numpy()
        return array

    def add(self, measurement, factors, ids, past_weight):
        """Put a measurement {metric: [a tensor a block]} into `latest` and, beside past_weight of the past,
        into `mean`.

        The averages have `load` in the place of utilisation: what a head sends, over the mean of its layer's
        heads at work, as both were at that measurement. 1 is an equal share. So an average load is never
        above the largest load that was measured, whichever heads came and went meanwhile; an average of
        shares would be, since a share grows when others are withdrawn. While a head is withdrawn, the
        averages in STAND_STILL stay what they were, since what it would send cannot be seen. A head that was
        never at work counts as the mean of those that are.

        factors: agency's factors, [a tensor a block]; ids: see spread().
        """
        self.latest = {name: self.spread(blocks, ids) for name, blocks in measurement.items()}
        # not where it was opened by hand
        self.withdrawn = (self.spread(factors, ids) == 0) & (self.latest["gate"] == 0)
        sent = self.latest["utilisation"]
        equal = self.mean_at_work(sent)
        load = np.divide(sent, equal, out=0 * sent, where=equal > 0)
        for name, values in {**self.latest, "load": load}.items():
            old_mean = self.mean.get(name, np.full(self.shape, math.nan))
            keep = past_weight * np.isfinite(old_mean)
            mean = values * (1 - keep) + np.nan_to_num(old_mean) * keep
            if name in STAND_STILL:
                as_before = np.where(np.isfinite(old_mean), old_mean, self.mean_at_work(values))
                mean = np.where(self.withdrawn, as_before, mean)
            self.mean[name] = mean

    def mean_of_peers(self, values):
        """The mean over the heads of each layer, [blocks, 1]; 0: none."""
        n = np.isfinite(values).sum(1, keepdims=True)
        return np.nansum(values, 1, keepdims=True) / np.maximum(n, 1)

    def mean_at_work(self, values):
        """The mean over the peers whose gate is not 0."""
        return self.mean_of_peers(np.where(self.latest["gate"] != 0, values, math.nan))

    def features(self):
        """[heads, Agency.METRICS] of those that are present, in all_heads()' order."""
        m, floor = self.mean, 1e-12
        relative = [np.log(np.maximum(m[k], floor) / np.maximum(self.mean_of_peers(m[k]), floor)).clip(-5, 5)
                    for k in ("gradient", "importance")]
        columns = [m["entropy"], *relative, m["load"].clip(0, 5), m["gate"], m["conflict"]]
        return torch.from_numpy(np.stack([column[self.is_present] for column in columns], 1))

    def state(self):
        """For a checkpoint: a dict of tensors."""
        return dict(mean=tensors_of(self.mean), now=tensors_of(self.latest))

    def load(self, state):
        self.mean, self.latest = (arrays_of(state[name], self.shape) for name in ("mean", "now"))


class Measurements:
    """What is measured of a run: its heads, and its loss on held-out text.

    heads: Metrics. losses: nats per token on the held-out text since the last growth; held_out_loss: the last
    of them. count: measurements so far.
    """

    def __init__(self, run):
        c, process, T = run.config, run.process, run.model.config.block_size
        self.config = c
        self.text = [t.to(process.device) for t in
                     fixed_text(run.dataset, "train", T, c.controller_tokens, process.rank, process.world)]
        self.held_out_text = [t.to(process.device) for t in fixed_text(
            run.dataset, "val", T, c.controller_heldout, process.rank, process.world)]
        self.autocast = precision(c.dtype, process.kind)[1]
        self.count, self.losses, self.held_out_loss = 0, [], math.nan
        n_extra, size = max(attn.n_extra for attn in attentions(run.model)), run.model.config
        self.heads = Metrics((size.n_layer, size.n_head + n_extra))
        self.counts = {name: np.full(self.heads.shape, 0) for name in ("high", "small", "low")}
        self.high = np.full(self.heads.shape, False)  # whose entropy is high, with hysteresis

    def held_out_nats(self, run):
        """Mean nats per token of the held-out text, of all ranks."""
        nats = nats_on(run.model, *self.held_out_text, self.autocast)
        n = len(self.held_out_text[0])
        total, n = run.process.all_reduce_sum([nats * n, float(n)])
        return total / n

    def update(self, run):
        """Measure once more. UserError where a metric is not finite."""
        model, past_weight = run.model, self.config.controller_average
        try:
            of_heads = measure(model, *self.text, self.autocast)
        except ValueError as e:
            raise UserError(f"step {run.step}: {e}; lower {' or '.join(keys_of_rates(run.config))}") from None
        factors = [torch.ones(attn.n_total) if attn.agency is None else attn.agency.gate().detach()
                   for attn in attentions(model)]
        self.heads.add(mean_of_ranks(of_heads, run.process), factors, head_ids(model), past_weight)
        self.held_out_loss = self.held_out_nats(run)
        self.losses.append(self.held_out_loss)

    def forget_missing(self, model):
        """Forget what was measured of heads that the model no longer has; [blocks, heads] of those."""
        is_gone = np.full(self.heads.shape, True)
        for place in all_heads(model):
            is_gone[place] = False
        for values in (*self.heads.mean.values(), *self.heads.latest.values()):
            values[is_gone] = math.nan
        return is_gone

    def lasts(self, name, condition):
        """Where a condition has held for controller_patience measurements in a row, [blocks, heads]."""
        count = np.where(condition, self.counts[name] + 1, 0)
        self.counts[name] = count
        return count >= self.config.controller_patience

    def state(self):
        """For a checkpoint: a dict of tensors, lists and numbers."""
        return dict(measured=self.count, losses=self.losses, heldout_now=self.held_out_loss,
                    high=torch.from_numpy(self.high.copy()), counts=tensors_of(self.counts),
                    **self.heads.state())

    def load(self, state):
        self.count, self.losses, self.held_out_loss = (
            state[key] for key in ("measured", "losses", "heldout_now"))
        self.high = arrays_of(dict(high=state["high"]), self.heads.shape)["high"]
        self.counts = arrays_of(state["counts"], self.heads.shape)
        self.heads.load(state)


def mean_of_ranks(values, process):
    """{metric: [a tensor a block]} as the mean of all ranks, float64 on the CPU."""
    flat = torch.cat([t.cpu().double() for blocks in values.values() for t in blocks]).tolist()
    sizes = [len(t) for blocks in values.values() for t in blocks]
    parts = torch.tensor(process.all_reduce_sum(flat), dtype=torch.float64) / process.world
    parts = iter(parts.split(sizes))
    return {name: [next(parts) for _ in blocks] for name, blocks in values.items()}


def tensors_of(arrays):
    return {key: torch.from_numpy(value.copy()) for key, value in arrays.items()}


def arrays_of(tensors, shape):
    """tensors_of() backwards. RuntimeError: one is not of this shape."""
    return {key: value.view(shape).cpu().numpy().copy() for key, value in tensors.items()}

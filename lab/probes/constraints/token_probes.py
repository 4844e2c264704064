"""
Probes of hidden states: what can be told of a token from what the attention of some blocks reads.

They are linear, or MLPs of one hidden layer; fitted to tokens of train, chosen on tokens of val.
"""

import copy
import hashlib
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from nanoheads import checkpoint
from nanoheads.common import UserError, write_atomic
from nanoheads.files import sha256
from nanoheads.timing import progress_bar
from lab.probes.constraints.setup import (HEADS, branch_size, labels_of, layers_of, names_of, outputs,
                                          starts_of)

DECAYS = (1e-6, 1e-4, 1e-2)         # of a probe's weights; the best on val is taken
STEPS, BATCH, LR = 6000, 512, 5e-3  # of an MLP probe by Adam, its rate falling to 0 in a straight line
CHECKS = 20                         # of an MLP probe on val, as it is fitted


class Probe(nn.Module):
    """Logits [..., names] of states [..., C], standardised as those it is fitted to; width 0: linear.

    It starts as the prior, whatever it reads.
    """

    def __init__(self, states, labels, width, seed):
        super().__init__()
        is_known = labels >= 0
        prior = (labels * is_known).sum(0) / is_known.sum(0).clamp_min(1)
        self.register_buffer("mean", states.mean(0))
        self.register_buffer("std", states.std(0).clamp_min(1e-6))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.inner = nn.Linear(states.size(-1), width) if width else None
            self.out = nn.Linear(width or states.size(-1), labels.size(-1))
        nn.init.zeros_(self.out.weight)
        self.out.bias.data.copy_(prior.clamp(1e-4, 1 - 1e-4).logit())
        self.to(states.device)

    def forward(self, x):
        x = (x - self.mean) / self.std
        return self.out(x if self.inner is None else F.relu(self.inner(x)))

    def penalty(self):
        return sum(p.square().sum() for p in self.parameters() if p.dim() > 1) / 2

    def size(self):
        return sum(p.numel() for p in self.parameters())


def nats_of_names(logits, labels):
    """Cross-entropy [names], each the mean over its known tokens; logits and labels [n, names]."""
    is_known = labels >= 0
    nats = F.binary_cross_entropy_with_logits(logits, labels.clamp_min(0), reduction="none")
    return (nats * is_known).sum(0) / is_known.sum(0).clamp_min(1)


def descend(probe, states, labels, decay, seed):
    """Minimise cross-entropy + decay * penalty(); yields where the probe may be kept.

    A linear one by L-BFGS to the end; an MLP by Adam, CHECKS times on the way.
    """
    def loss_of(rows):
        return nats_of_names(probe(states[rows]), labels[rows]).sum() + decay * probe.penalty()

    if probe.inner is None:
        optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=200, history_size=20,
                                      tolerance_grad=1e-6, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = loss_of(slice(None))
            loss.backward()
            return loss

        optimizer.step(closure)
        yield
        return
    optimizer, generator = torch.optim.Adam(probe.parameters(), LR), torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        optimizer.zero_grad()
        loss_of(torch.randint(len(states), (BATCH,), generator=generator).to(states.device)).backward()
        optimizer.step()
        if (step + 1) % (STEPS // CHECKS) == 0:
            yield


def fit_probe(fit_data, choice_data, width, seed):
    """The Probe fitted to (states [n, C], labels [n, names]) that is best on the other such pair.

    Of all weight decays, of an MLP also checks on the way; a linear one for each name by itself.
    """
    best = Probe(*fit_data, width, seed)
    with torch.no_grad():
        lowest = nats_of_names(best(choice_data[0]), choice_data[1])
    bar = progress_bar(len(DECAYS) * (CHECKS if width else 1), "MLP probe" if width else "linear probe")
    for decay in DECAYS:
        probe = Probe(*fit_data, width, seed)
        for _ in descend(probe, *fit_data, decay, seed):
            bar.update(1)
            with torch.no_grad():
                nats = nats_of_names(probe(choice_data[0]), choice_data[1])
                if width:
                    if nats.sum() < lowest.sum():
                        best, lowest = copy.deepcopy(probe), nats
                else:
                    better = nats < lowest
                    best.out.weight[better] = probe.out.weight[better]
                    best.out.bias[better] = probe.out.bias[better]
                    lowest = torch.where(better, nats, lowest)
    bar.close()
    return best.requires_grad_(False)


def load_or_fit(ckpt, fit_data, choice_data, width, seed):
    """fit_probe(), or the Probe that it found before for the same states and labels, which the run keeps."""
    path, probe = probe_file(ckpt, fit_data, choice_data, width, seed), Probe(*fit_data, width, seed)
    if path and path.is_file():
        with suppress(Exception):  # one that is damaged is fitted anew
            probe.load_state_dict(torch.load(path, map_location=probe.mean.device, weights_only=True))
            return probe.requires_grad_(False)
    probe = fit_probe(fit_data, choice_data, width, seed)
    if path:
        with suppress(UserError, OSError):  # a folder that takes no file
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, lambda file: torch.save(probe.state_dict(), file))
    return probe


def probe_file(ckpt, fit_data, choice_data, width, seed):
    """The file of a probe, by all that it depends on; None: the checkpoint has no folder here."""
    name = Path(ckpt.name)
    folder = name if name.is_dir() else name.parent
    if not (name.is_file() or checkpoint.file_of(name).is_file()):
        return None
    digest = hashlib.sha256(f"{width} {seed} {torch.__version__} {sha256(__file__)}".encode())
    for tensor in (*fit_data, *choice_data):  # what the model gave for the tokens, and their labels
        digest.update(f"{list(tensor.shape)} {tensor.device.type}".encode())
        digest.update(tensor.contiguous().cpu().numpy())
    return folder / "probes" / f"{digest.hexdigest()[:16]}.pt"


def mlp_width(model, n_names):
    """Width of the MLP probe whose parameters come nearest to branch_size()."""
    inputs = len(layers_of(model)) * model.config.n_embd
    return max(1, round((branch_size(model) - n_names) / (inputs + 1 + n_names)))


def probes_of(ckpt, setup, args, whose):
    """{scorer: Probe} on a checkpoint's states: linear, and an MLP with as many parameters as the heads."""
    pairs, device = [], next(ckpt.model.parameters()).device
    for part in setup.parts[:2]:
        starts = starts_of(part, setup.context, args.fit)
        states = outputs(ckpt, setup, part.split, starts, setup.context, {"states": lambda x, _: x})["states"]
        labels = labels_of(setup, part.split, starts, setup.context)
        pairs.append((states.flatten(0, 1).to(device), labels.to(device)))
    model, n = setup.ckpts[0].model, len(setup.names)
    return {f"linear probe, {whose}": load_or_fit(ckpt, *pairs, 0, args.seed),
            f"MLP probe, {whose}": load_or_fit(ckpt, *pairs, mlp_width(model, n), args.seed)}


def takers_of(ckpt, setup, args):
    """({scorer: taker}, {scorer: parameters}) of a checkpoint. A taker makes logits [..., names] of (states,
    scores): the heads' own, with --own those of probes as well; of a plain GPT those of probes.
    """
    takers, sizes, heads = {}, {}, bool(layers_of(ckpt.model))
    if heads:
        columns = [names_of(ckpt.model).index(name) for name in setup.names]
        takers[HEADS], sizes[HEADS] = lambda _, scores: scores[..., columns], branch_size(ckpt.model)
    if args.own or not heads:
        for name, probe in probes_of(ckpt, setup, args, "own" if heads else "plain").items():
            takers[name] = lambda states, _, probe=probe: probe(states)
            sizes[name] = probe.size()
    return takers, sizes

"""
Moves the sentinel gates of a run between steps: by one of two rules, a network, or a policy by reward.

Each gives the change of every head's logit from what was measured (Measurements); move_gates() applies it.
Source: the Adaptive Transformer write-up, sections 3.2 and 4.2.
"""

import math

import numpy as np
import torch
from torch import nn

from model import Agency
from nanoheads.common import UserError
from lab.heads.measuring import all_heads, attentions, closed


FEATURES = Agency.METRICS + 1  # numbers of a head


def features_of(measurements):
    """[heads, FEATURES] of a run's Measurements: those of Metrics.features(), and the depth from 0 to 1."""
    heads = measurements.heads
    depth = np.nonzero(heads.is_present)[0] / max(1, len(heads.is_present) - 1)
    return torch.cat((heads.features(), torch.from_numpy(depth)[:, None]), 1)


def small_net(n, generator):
    """n numbers of a head -> one; its last layer begins at 0."""
    net = nn.Sequential(nn.Linear(n, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0.0, n ** -0.5, generator=generator) if p.dim() == 2 else p.zero_()
        net[-1].weight.zero_()
    return net


class FixedGates:
    """Moves no gate: training alone does."""

    def __init__(self, config, generator):
        self.config, self.generator = config, generator

    def moves(self, measurements, run):
        """The change of each head's logit, [heads], in all_heads()' order."""
        return torch.zeros(len(all_heads(run.model)), dtype=torch.float64)

    def state(self):
        return {}

    def load(self, state):
        pass


class ByRules(FixedGates):
    """Lower a gate's logit where entropy is long high, slightly where the gradient is long small.

    The write-up's two heuristics (section 3.2). Entropy is high from controller_entropy on until it is 0.05
    below it, so that a head at the threshold does not flicker.
    """

    def moves(self, measurements, run):
        c, step = self.config, self.config.controller_step
        heads = measurements.heads
        entropy, gradient = heads.mean["entropy"], heads.mean["gradient"]
        high = measurements.high
        high[entropy > c.controller_entropy] = True
        high[~(entropy >= c.controller_entropy - 0.05)] = False
        with np.errstate(invalid="ignore"):
            small = gradient < c.controller_gradient * heads.mean_of_peers(gradient)
        long_high = measurements.lasts("high", high)
        long_small = measurements.lasts("small", small)
        delta = -step * long_high - step / 4 * long_small
        return torch.from_numpy(delta[heads.is_present])


class ByNetwork(FixedGates):
    """A network predicts from a head's metrics what closing it would cost; gates move by that and a price.

    Signal: at each measurement a few heads, drawn at random, are closed one by one and the held-out loss is
    taken, weights fixed. The network learns asinh(rise / controller_cost) of the last 256 such trials. A
    head's logit then moves by controller_step * tanh(prediction - asinh(1)): down where it is not worth it.
    """

    TRIALS, MEMORY = 4, 256

    def __init__(self, config, generator):
        super().__init__(config, generator)
        self.net = small_net(FEATURES, generator)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.trials = torch.zeros(0, FEATURES + 1, dtype=torch.float64)

    def moves(self, measurements, run):
        heads, features = all_heads(run.model), features_of(measurements)
        for i in torch.randperm(len(heads), generator=self.generator)[:self.TRIALS].tolist():
            with closed(run.model, [heads[i]]):
                rise = measurements.held_out_nats(run) - measurements.held_out_loss
            target = math.asinh(rise / self.config.controller_cost)
            row = torch.cat((features[i], torch.tensor([target], dtype=torch.float64)))
            self.trials = torch.cat((self.trials, row[None]))[-self.MEMORY:]
        for _ in range(20):
            error = (self.net(self.trials[:, :-1]).squeeze(-1) - self.trials[:, -1]).square().mean()
            self.adam.zero_grad()
            error.backward()
            self.adam.step()
        with torch.no_grad():
            cost = self.net(features).squeeze(-1)
        return self.config.controller_step * torch.tanh(cost - math.asinh(1))

    def state(self):
        return dict(net=self.net.state_dict(), adam=self.adam.state_dict(), seen=self.trials)

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.adam.load_state_dict(state["adam"])
        self.trials = state["seen"].cpu()


class ByReward(FixedGates):
    """Actor-critic over the run: reward = fall of the held-out loss since the last move - cost * open heads.

    Each head's action is drawn from N(actor(metrics), 1/4) and moves its logit by controller_step * tanh. The
    critic's value of a moment is its mean over heads; the advantage is r + 0.9 V' - V, in units of the cost.
    """

    GAMMA, SPREAD = 0.9, 0.5

    def __init__(self, config, generator):
        super().__init__(config, generator)
        self.actor, self.critic = small_net(FEATURES, generator), small_net(FEATURES, generator)
        self.adam = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=0.01)
        self.last_move = None  # (features, actions, held-out loss) of the move before

    def moves(self, measurements, run):
        features = features_of(measurements)
        if self.last_move is not None:
            features_before, actions, loss = self.last_move
            open_heads = float(np.nansum(measurements.heads.latest["gate"]))
            reward = (loss - measurements.held_out_loss) / max(self.config.controller_cost, 1e-6) - open_heads
            value = self.critic(features_before).mean()
            with torch.no_grad():
                target = reward + self.GAMMA * self.critic(features).mean()
            advantage = target - value
            log_likelihood = -((actions - self.actor(features_before).squeeze(-1)) / self.SPREAD).square() / 2
            loss = advantage.square() - (advantage.detach().clamp(-10, 10) * log_likelihood).mean()
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
        with torch.no_grad():
            noise = torch.randn(len(features), generator=self.generator, dtype=torch.float64)
            actions = self.actor(features).squeeze(-1) + self.SPREAD * noise
        self.last_move = features, actions, measurements.held_out_loss
        return self.config.controller_step * torch.tanh(actions)

    def state(self):
        last = None if self.last_move is None else list(self.last_move)
        return dict(actor=self.actor.state_dict(), critic=self.critic.state_dict(),
                    adam=self.adam.state_dict(), last=last)

    def load(self, state):
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self.adam.load_state_dict(state["adam"])
        self.last_move = state["last"] and [t.cpu() if torch.is_tensor(t) else t for t in state["last"]]


MOVERS = {None: FixedGates, "rules": ByRules, "ann": ByNetwork, "rl": ByReward}


# ---- applied ----

def move_gates(mover, measurements, run):
    """Add the mover's changes to the gates' logits; no move leads beyond controller_bound."""
    deltas, bound = mover.moves(measurements, run), run.config.controller_bound
    if not deltas.isfinite().all():
        raise UserError(f"step {run.step}: the controller's moves are not finite")
    deltas, start = deltas.float(), 0
    for attn in attentions(run.model):
        logit = attn.sentinel.logit.detach()
        delta = deltas[start:start + len(logit)].to(logit.device)
        up, down = (bound - logit).clamp_min(0), (-bound - logit).clamp_max(0)
        logit.add_(torch.minimum(torch.maximum(delta, down), up))
        start += len(logit)


def set_sparsity(run):
    """The weight of the gates' penalty, which stays from one measurement to the next."""
    if run.config.sparsity_warmup:
        step = run.step - run.step % run.config.controller_interval  # of the last measurement
        share = min(1.0, step / run.config.sparsity_warmup)
        for attn in attentions(run.model):
            attn.sentinel.set_coef(run.model.config.sentinel_coef * share)

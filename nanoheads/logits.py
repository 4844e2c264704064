"""
Functions of a model's logits: losses, the returns that A2C's critic learns, sampling the next token. Tensors
in, tensors out; no model here.
"""

import math

import torch
from torch.nn import functional as F

from nanoheads.kernels import product_dtype


# ---- losses ----

MAX_LOGIT_BYTES = 1e9  # bytes of logits in memory, above which a loss takes them in portions


def portions(chunks, x, vocab_size):
    """In how many portions to compute the logits of x [B, T, C]; chunks: the flag, None: none of over 1 GB.

    The last portion may be smaller than the others.
    """
    if chunks is not None:
        return chunks
    tokens = x.size(0) * x.size(1)
    return max(1, math.ceil(tokens * vocab_size * product_dtype(x).itemsize / MAX_LOGIT_BYTES))


def discounted_return(r, is_scored, gamma, positions=None):
    """G_t = sum_k gamma^k r_(t+k) / sum_k gamma^k over the tokens that are left and `is_scored`, [B, T].

    That is (1 - gamma) sum_k gamma^k r_(t+k), the weights beyond the text's end shared out among the rest.
    positions [B, T]: tokens of its document before each token, where a row has several documents; a return
    ends with its own. The sums are made by doubling steps: log2(T) passes and no T x T matrix.
    """
    sums, step = torch.stack((r * is_scored, is_scored.to(r.dtype))), 1
    while step < r.size(1):
        later = sums[..., step:]
        if positions is not None:
            later = later * (positions[:, step:] >= step)  # `step` tokens on it is another document
        sums = sums + gamma**step * F.pad(later, (0, step))
        step *= 2
    return sums[0] / sums[1].clamp_min(1e-12)


def label_losses(scores, targets, coefs=None, focal=0.0, positive=1.0):
    """{name: its part of the mean over names} of weighted BCE with logits, in nats.

    scores, targets: {name: [B, T]}. Targets are in [0, 1], those below 0 are ignored: where all are, the part
    is 0. focal: factor |target - p|^focal (focal loss, arXiv 1708.02002, for soft targets); positive: weight
    of positive targets. Raises ValueError for a name that has no scores.
    """
    unknown = set(targets) - set(scores)
    if unknown or not targets:
        raise ValueError(f"constraint targets for {sorted(unknown) or 'nothing'}; "
                         f"the heads are for {', '.join(scores)}")
    terms = {}
    for name, y in targets.items():
        s = scores[name].to(torch.promote_types(scores[name].dtype, torch.float32))
        y = y.to(s.dtype)
        is_known, y = y >= 0, y.clamp_min(0)
        weight = torch.tensor(positive, dtype=s.dtype, device=s.device)
        nats = F.binary_cross_entropy_with_logits(s, y, reduction="none", pos_weight=weight)
        if focal:  # below an exponent of 1 the slope at 0 is infinite, and infinity times 0 is not a number
            nats = nats * (y - s.sigmoid()).abs().clamp_min(1e-12) ** focal
        mean = (nats * is_known).sum() / is_known.sum().clamp_min(1)
        terms[name] = (coefs or {}).get(name, 1.0) * mean / len(targets)
    return terms


def distance_to_teacher(scores, teacher_scores, by):
    """The distance of scores or outputs from a teacher's, both any shape.

    kl: of the teacher's probabilities to these, nats a token; huber: of the values.
    """
    if by == "huber":
        return F.huber_loss(scores, teacher_scores)
    p = teacher_scores.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(teacher_scores, p)
    return F.binary_cross_entropy_with_logits(scores, p) - entropy


def distance_to_features(features, teacher_features, by):
    """The distance of features from a teacher's, both [B, T, C].

    kl: of the softmax over the teacher's features to that over these, nats a token; huber: of the values.
    """
    if by == "huber":
        return F.huber_loss(features, teacher_features)
    log_p, log_q = teacher_features.log_softmax(-1), features.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def logit(p):
    """log(p / (1 - p)) of a number, infinite at 0 and 1."""
    return math.log(p / (1 - p)) if 0 < p < 1 else math.copysign(math.inf, p - 0.5)


# ---- sampling ----

def check_sampling(temperature, top_k, top_p, repetition_penalty):
    """Raise ValueError for settings that mean nothing (written so that NaN fails too)."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be 0 (the likeliest token) or positive")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be in (0, 1]")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty={repetition_penalty} must be positive (1: off)")


def penalise(logits, tokens, penalty):
    """Make the tokens in `tokens` less likely, in place; logits [V] (CTRL, arXiv 1909.05858, section 4.1)."""
    tokens = tokens.unique()
    logits[tokens] = torch.where(logits[tokens] > 0, logits[tokens] / penalty, logits[tokens] * penalty)


class NotNumbers(ValueError):
    """What a token would be drawn by is NaN or infinite."""

    def __init__(self):
        super().__init__("the probabilities are not numbers: damaged weights, or an extreme temperature or "
                         "repetition_penalty")


def sample_token(logits, temperature, top_k, top_p, generator):
    """One token per row, [B], from logits [B, V]: of the k likeliest, of those that hold top_p of the mass.

    generator: of all rows, or a list with one for each. Raises NotNumbers.
    """
    if temperature == 0:
        token = logits.argmax(-1)  # of a NaN where there is one
        if not logits.gather(-1, token[:, None]).isfinite().all():
            raise NotNumbers
        return token
    if temperature != 1:
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: cannot overflow
    if top_k is not None and top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    probs = F.softmax(logits, dim=-1)
    if top_p is not None and top_p < 1:
        sorted_probs, order = probs.sort(descending=True)
        beyond = sorted_probs.cumsum(-1) - sorted_probs >= top_p  # the mass before it is enough
        beyond[:, 0] = False  # never the first, also where top_p is 0 in the precision of probs
        probs = probs.masked_fill(beyond.scatter(-1, order, beyond), 0.0)
    try:
        if isinstance(generator, list):
            return torch.cat([torch.multinomial(row, 1, generator=row_generator)
                              for row, row_generator in zip(probs, generator)])
        return torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    except RuntimeError as e:
        if "probability tensor" not in str(e):
            raise
        raise NotNumbers from None

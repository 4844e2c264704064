"""
The attention function of every model and mechanism, attend(), which chooses the kernel. It gives the heads'
outputs and, on request, statistics of the attention rows. Which path it takes:

    what is asked for            without a score function            with one
    outputs alone                PyTorch's fused kernels             FlexAttention on a GPU, else portions
    each row's log-sum-exp too   FlexAttention on a GPU, CpuFlash    FlexAttention on a GPU, else portions
                                 on a CPU, else portions
    the row's shape too          the same, twice: row_statistics()   portions

A mask that leaves out more than the future is a BlockMask in training: FlexAttention takes it on a GPU, and
elsewhere it is made for some queries at a time. Portions hold the logits of some queries in memory, and in
training the backward pass computes them again. So nothing of size T x T is kept on any path. One query, as
when decoding, is one portion.

Rows may hold several documents, of which none sees another. On a GPU, and in a compiled graph, each row has a
BlockMask of its own. Elsewhere attend() is given Documents: it takes them apart, so that each is a row by
itself for the kernels above, and costs no more than its own length.

A score function has the signature of FlexAttention's score_mod: (score, b, h, t, s) -> score, where score is
the scaled logit of query t for key s in row b and head h. The numbers b, h, t and s are integer tensors that
broadcast against it, or scalars inside FlexAttention, so a function indexes with them and computes with them,
and never asks for a shape. t and s count the columns that were read so far: with a cache the queries are the
last of them.

Nothing here knows of a model: tensors in, tensors out. B: batch, H: heads, T: queries, S: keys, D: head size.
"""

import functools
import math
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple, Optional

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from nanoheads.kernels import NO_TRITON, allow_graphs, for_each_head


class RowStats(NamedTuple):
    """What is known of every attention row, each [B, H, T]; None where it was not asked for."""

    lse: torch.Tensor                       # log-sum-exp of its logits
    entropy: Optional[torch.Tensor] = None  # in nats
    log_p2: Optional[torch.Tensor] = None   # log of the sum of its squared weights
    spread: Optional[torch.Tensor] = None   # sum of squared differences of its weights from their mean, 1 / n


def attend(q, k, v, *, scale, mask=None, score_mod=None, stats=None, spread=False, n_keys=None, detach=False,
           dropout=0.0, open=None):
    """(y [B, H, T, D], RowStats or None): causal attention of q [B, H, T, D] over k, v [B, H or fewer, S, D].

    The last T of the S keys are the queries' own tokens. mask: who sees whom, a bool tensor [1 or B, 1, T,
    S], a BlockMask or Documents; None: causal. score_mod: see above. stats: "lse" or "shape", which is the
    entropy and log_p2 too. spread: that of each row too. n_keys: how many keys each row sees, [T] or [B, 1,
    T], for these statistics. detach: no gradient goes into the statistics, which costs less. dropout: on the
    weights; the statistics are those of the weights before it. open: bool [B, H], the heads whose outputs are
    wanted in each row; None: all. Where PyTorch's fused kernels give them, the others are not computed: 0.
    """
    stats = stats or ("lse" if spread else None)
    if isinstance(mask, Documents):
        return attend_documents(q, k, v, mask, n_keys, score_mod, scale=scale, stats=stats, spread=spread,
                                detach=detach, dropout=dropout)
    if mask is None and 1 < q.size(2) < k.size(2):  # kernels would take the first keys for the queries' own
        mask = visible_keys(None, columns_of(q, k), k.size(2))[None, None]
    if not q.numel():  # torch 2.11 divides by the number of heads
        empty = q.new_zeros(q.shape[:3])
        y = q @ for_each_head(k, q.size(1)).mT @ for_each_head(v, q.size(1))
        return y, RowStats(empty, empty, empty, empty) if stats else None
    is_block_mask = isinstance(mask, BlockMask)
    on_gpu = is_block_mask and has_flex_attention(q.device)
    if is_block_mask and dropout and score_mod is None and not stats:
        mask = None  # it is there for traces alone: a window is refused with dropout
        is_block_mask = False
    if not stats and score_mod is None and (on_gpu or not is_block_mask):
        if on_gpu:
            return flex(q, k, v, scale, mask)[0], None
        # how many are open depends on the data, which a compiled graph cannot
        if open is not None and not torch.compiler.is_compiling():
            return attend_open_heads(q, k, v, scale, mask, dropout, open), None
        return attend_fused(q, k, v, scale, mask, dropout), None

    k, v = for_each_head(k, q.size(1)), for_each_head(v, q.size(1))
    options = dict(stats=stats, spread=spread, detach=detach, dropout=dropout)
    if score_mod is not None and on_gpu and stats != "shape" and not spread and not dropout:
        y, lse = flex(q, k, v, scale, mask, score_mod)
        return y, RowStats(lse.detach() if detach else lse) if stats else None
    flash = q.device.type == "cpu" and q.size(2) > 1
    if score_mod is not None or stats and not on_gpu and not flash:
        return attend_in_portions(attend_by_logits, q, k, v, mask, n_keys, scale=scale, score_mod=score_mod,
                                  **options)
    if is_block_mask and not on_gpu:
        return attend_in_portions(attend_by_flash, q, k, v, mask, n_keys, scale=scale, **options)
    return row_statistics(q, k, v, scale, mask, n_keys, **options)


def combine_scores(functions, n_own, n_added=0):
    """One score function of several, [(function or None, does it act on added heads too)]; None: all are.

    n_own, n_added: a layer's own heads, and those that another mechanism has added behind them. A function
    that acts on the own heads alone never sees the number of another one.
    """
    functions = [(function, on_all_heads or not n_added) for function, on_all_heads in functions
                 if function is not None and (on_all_heads or n_own)]
    if not functions:
        return None

    def score_mod(score, b, h, t, s):
        for function, on_all_heads in functions:
            if on_all_heads:
                score = check_score(function, function(score, b, h, t, s), score)
            else:
                own_score = check_score(function, function(score, b, h.clamp_max(n_own - 1), t, s), score)
                score = torch.where(h < n_own, own_score, score)
        return score

    score_mod.functions = [function for function, _ in functions]  # whose files and lines a message names
    return score_mod


class ScoreError(ValueError):
    """A score function returned what cannot be scores. files: where it, or each of several, was written."""

    def __init__(self, function, words):
        codes = [code_of(part) for part in getattr(function, "functions", [function])]
        self.files = [code.co_filename for code in codes]
        places = " or ".join(f"{code.co_filename}, line {code.co_firstlineno}" for code in codes)
        super().__init__(f"{places}: {words}")


def code_of(function):
    """The code of a function, of what functools.partial calls, or of an object's __call__()."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", None) or type(function).__call__.__code__


def check_score(function, score, old_score):
    """The score that a score function returned; ScoreError where it is no score."""
    if not torch.is_tensor(score) or score.shape != old_score.shape:
        description = f"the shape {[*score.shape]}" if torch.is_tensor(score) else f"a {type(score).__name__}"
        raise ScoreError(function, f"the score function was given scores of the shape {[*old_score.shape]} "
                                   f"and returned {description}; it must return scores of the same shape")
    if not score.is_floating_point():
        raise ScoreError(function, f"the score function returned {score.dtype}; scores must be "
                                   "floating-point numbers")
    return score


# ---- PyTorch's fused kernels ----

def attend_fused(q, k, v, scale, mask, dropout):
    """The outputs of causal attention, without a score function and without statistics."""
    causal = mask is None and q.size(2) > 1  # one query sees all there is
    options = dict(attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout)
    if k.size(1) != q.size(1):
        options["enable_gqa"] = True
    width = v.size(-1)
    q, k, v = pad_to_eights(q, k, v)
    if not torch.compiler.is_compiling() and costs_a_plan(q):
        with without_cudnn():
            y = F.scaled_dot_product_attention(q, k, v, **options)
    else:
        y = F.scaled_dot_product_attention(q, k, v, **options)
    return y if y.size(-1) == width else y[..., :width]


SKIP_FROM = 2048  # keys from which skipping heads pays at decode on CPU (measured: docs/results/speed.md)


def attend_open_heads(q, k, v, scale, mask, dropout, open):
    """attend_fused() for those heads alone that are open in a row, bool [B, H]; the others give 0.

    Neighbouring heads that are open in the same rows are computed together, and so are neighbouring rows: all
    of them where they lie, since gathering keys and values costs more than it saves when decoding. Of heads
    that share keys only those of one group are joined.
    """
    y, group = q.new_zeros(*q.shape[:3], v.size(-1)), q.size(1) // k.size(1)
    rows_of = open.expand(len(q), -1).T.tolist()  # whether each row is, of each head
    for heads in runs([(rows, head // group if group > 1 else 0) for head, rows in enumerate(rows_of)]):
        shared_keys = slice(heads.start // group, -(-heads.stop // group))
        for rows in runs(rows_of[heads.start]):
            if rows_of[heads.start][rows.start]:
                row_mask = mask if mask is None or len(mask) == 1 else mask[rows]
                y[rows, heads] = attend_fused(q[rows, heads], k[rows, shared_keys], v[rows, shared_keys],
                                              scale, row_mask, dropout)
    return y


def runs(values):
    """The slices of a list in which neighbouring values are equal."""
    stop = 0
    for _, equal in groupby(values):
        start, stop = stop, stop + len([*equal])
        yield slice(start, stop)


def pad_to_eights(q, k, v):
    """q, k and v with zeros behind their last dimension, up to a multiple of 8, where a kernel wants that.

    They add nothing to a logit, and what they make of the output is 0 and cut off. The scale has to be given:
    a kernel's own would be that of the wider heads.
    """
    if not wants_eights(q.device):
        return q, k, v
    return [F.pad(t, (0, -t.size(-1) % 8)) if t.size(-1) % 8 else t for t in (q, k, v)]


def wants_eights(device):
    """Whether attention kernels want head sizes that are multiples of 8.

    On a GPU, cuDNN's and the memory-efficient one refuse others, so that only one that stores all T x T
    logits is left wherever there is a mask, or float32; flash attention pads them itself, and FlexAttention
    would read them unaligned. CPU kernels take any size, and padding only costs them time.
    """
    return device.type == "cuda"


def costs_a_plan(q):
    """Whether cuDNN's attention would make a plan for each of many lengths: when decoding, and when texts are
    scored uncompiled.
    """
    return q.is_cuda and (q.size(2) == 1 or not torch.is_grad_enabled())


@contextmanager
def without_cudnn():
    """Inside, PyTorch uses another of its attention kernels than cuDNN's."""
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


# ---- FlexAttention ----

FLEX_MIN = 16  # head sizes below it are refused by FlexAttention on CUDA
ROOMY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)}  # cards with 163 KB of shared memory or more


def has_flex_attention(device):
    """Whether FlexAttention has fused kernels here, forward and backward: on a Mac's GPU it has no backward.
    """
    return device.type == "cuda" and not NO_TRITON


@functools.cache
def compiled_flex():
    """FlexAttention is a fused kernel only when compiled, also where the model around it is not."""
    allow_graphs()  # one for each shape; eager is T x T
    return torch.compile(flex_attention, dynamic=False)


def flex(q, k, v, scale, mask, score_mod=None):
    """FlexAttention: (y, log-sum-exp), differentiable in both; mask is a BlockMask. Narrow heads are padded
    with zeros, and so are those whose size is no multiple of 8.
    """
    k, v, width = for_each_head(k, q.size(1)), for_each_head(v, q.size(1)), v.size(-1)
    q, k, v = pad_to_eights(q, k, v)
    q, k, v = (F.pad(t, (0, FLEX_MIN - t.size(-1))) if t.size(-1) < FLEX_MIN else t for t in (q, k, v))
    kernel = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else compiled_flex()
    options = None
    if q.is_cuda:
        roomy = torch.cuda.get_device_capability(q.device) in ROOMY
        options = flex_tiles(max(q.size(-1), v.size(-1)), q.element_size(), roomy)
        if score_mod is not None:  # its tables are loaded ahead too, and several stages of them do not fit
            options = {"fwd_num_stages": 1, "bwd_num_stages": 1, **(options or {})}
    y, aux = kernel(q, k, v, score_mod, mask, scale=scale, kernel_options=options,
                    return_aux=AuxRequest(lse=True))
    if not width and torch.is_grad_enabled():  # the backward pass needs a gradient of y: here it is 0
        return y[..., :0], aux.lse + 0.0 * y[..., 0]
    return y[..., :width], aux.lse


def flex_tiles(width, itemsize, roomy):
    """Kernel options of FlexAttention for heads so wide, each number so many bytes; None: its own.

    Its own tiles need more shared memory than a card has once a row of a head, padded to a power of two,
    takes over 256 bytes, or over 128 where the card is not roomy: 99 KB, as on an L4 or an RTX 4090. These
    need 70 KB at most (results/gpu-compile.json).
    """
    row = itemsize << (width - 1).bit_length()
    if row <= (256 if roomy else 128):
        return None
    side = 32 if row <= 512 else 16
    forward = dict(fwd_BLOCK_M=2 * side, fwd_BLOCK_N=side, fwd_num_stages=1)
    sides = {f"bwd_BLOCK_{name}": side for name in ("M1", "N1", "M2", "N2")}
    return {**forward, **sides, "bwd_num_stages": 1}


# ---- masks by blocks of tokens ----

KERNEL_BLOCK = 128  # tokens in a block of FlexAttention's masks


def block_mask(T, device, mask_mod, window=None, n_global=0, random_blocks=None, begins=None):
    """BlockMask of T tokens: which blocks of keys each block of queries sees in part, and which whole.

    mask_mod(query, key): whether the one sees the other. window: tokens seen, beside the first n_global and
    random_blocks [blocks, blocks]; None: all before. begins [B, T]: the column at which each token's document
    begins, from which mask_mod counts; then each row has a mask of its own. Nothing is T x T.
    """
    size, n = KERNEL_BLOCK, -(-T // KERNEL_BLOCK)
    i = torch.arange(n, device=device)[:, None]
    j = i.T
    partial_blocks, full_blocks = i >= j, i > j
    if begins is not None:  # the first tokens of a document, and its cells, may be in any of its blocks
        lowest, highest = begins[:, ::size, None], begins[:, (i.flatten() * size + size - 1).clamp_max(T - 1)]
        partial_blocks = partial_blocks & (j * size + size > lowest)
        full_blocks = full_blocks & (j * size >= highest[..., None])
        if window:
            near = (i - j) * size - (size - 1) < window
            partial_blocks = partial_blocks & (near | (n_global > 0 or random_blocks is not None))
            full_blocks = full_blocks & ((i - j) * size + size - 1 < window)
    elif window:
        near = ((i - j) * size - (size - 1) < window) | (j * size < n_global)
        if random_blocks is not None:
            near = near | random_blocks[:n, :n]
        partial_blocks = partial_blocks & near
        full_blocks = full_blocks & (((i - j) * size + size - 1 < window) | (j * size + size - 1 < n_global))

    def block_lists(table):
        """How many blocks each row of a table has, and which, in the form of BlockMask."""
        order = table.int().argsort(dim=-1, descending=True, stable=True)
        n, order = table.sum(-1, dtype=torch.int32), order.int()
        return (n[None, None], order[None, None]) if begins is None else (n[:, None], order[:, None])

    def mask_of_row(b, h, query, key):
        if begins is None:
            return mask_mod(query, key)
        first = begins[b, query]
        return (key >= first) & mask_mod(query - first, key - first)

    return BlockMask.from_kv_blocks(*block_lists(partial_blocks & ~full_blocks), *block_lists(full_blocks),
                                    BLOCK_SIZE=size, seq_lengths=(T, T), mask_mod=mask_of_row)


def random_cells(T, cell, window, n_random):
    """Which cells of tokens before its window each cell also sees, bool [cells, cells] (BigBird).

    The draw is the same for every seed: a checkpoint trained on with another seed keeps its pattern.
    """
    n = -(-T // cell)
    reach = -(-(window - 1) // cell)  # cells that the window touches
    generator, table = torch.Generator().manual_seed(1337), torch.zeros(n, n, dtype=torch.bool)
    for row in range(reach + 1, n):
        table[row, torch.randperm(row - reach, generator=generator)[:n_random]] = True
    return table


def reached_blocks(cells, cell, T):
    """The kernel's blocks that cells of so many tokens reach into, bool [blocks, blocks]; cells: the same of
    cells. Made once: a number of cells that depends on data breaks a compiled graph.
    """
    i = torch.arange(len(cells))[:, None]
    blocks = torch.arange(-(-T // KERNEL_BLOCK))
    # which blocks each cell reaches into: it begins before their end, and ends after their beginning
    reaches = (i * cell < (blocks + 1) * KERNEL_BLOCK) & ((i + 1) * cell > blocks * KERNEL_BLOCK)
    reaches = reaches.float()
    return reaches.T @ cells.float() @ reaches > 0


def visible_keys(mask, queries, S):
    """Which of S keys each query sees, bool [T, S] or [B, 1, T, S]; queries: their columns [T, 1].

    mask: as for attend(), and if it is stored, of these queries alone.
    """
    if torch.is_tensor(mask):
        return mask
    keys = torch.arange(S, device=queries.device)
    if mask is None:
        return keys <= queries
    row = head = torch.zeros_like(queries[0, 0])  # a BlockMask is that of every head, and of every row
    if mask.shape[0] > 1:  # or each row has its own
        row = torch.arange(mask.shape[0], device=keys.device)[:, None, None, None]
    return mask.mask_mod(row, head, queries, keys)


# ---- several documents in a row ----

class Group(NamedTuple):
    """Documents of similar length, each a row by itself. Behind a short one its last token is repeated, which
    no token of it sees.
    """

    places: torch.Tensor  # [n, L]: of each token among all B * T
    mask: object          # who sees whom among L tokens, as for attend()


class Documents:
    """Who sees whom in B rows of T tokens that hold several documents.

    begins [B, T]: the column at which each token's document begins. make_mask(L): the mask of a row that is
    one document of L tokens.
    """

    def __init__(self, begins, make_mask):
        self.shape, device = begins.shape, begins.device
        T, n = begins.size(1), begins.numel()
        first = (begins == torch.arange(T, device=device)).flatten().nonzero().flatten()
        length = first.diff(append=first.new_tensor([n]))
        # two groups an octave: a document is at most half as long again as the shortest in its group
        octave = (2 * length.double().log2()).floor()
        self.groups, token_places, count = [], torch.empty(n, dtype=torch.long, device=device), 0
        for level in octave.unique():
            starts, lengths = first[octave == level, None], length[octave == level, None]
            offsets = torch.arange(int(lengths.max()), device=device)
            places, is_token = starts + offsets.minimum(lengths - 1), offsets < lengths
            self.groups.append(Group(places, make_mask(places.size(1))))
            token_places[places[is_token]] = count + is_token.flatten().nonzero().flatten()
            count += places.numel()
        self.token_places = token_places  # [B * T]: the place of each token among those of all groups


def attend_documents(q, k, v, documents, n_keys, score_mod, **options):
    """attend() of each of the Documents by itself."""
    def to_documents(x):
        """x [B, H, T, ...] -> [n, H, L, ...]"""
        flat = x.transpose(1, 2).flatten(0, 1).index_select(0, places.flatten())  # faster than flat[places]
        return flat.unflatten(0, places.shape).transpose(1, 2)

    def to_rows(parts):
        """Of all groups [n, H, L, ...] -> [B, H, T, ...]"""
        flat = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in parts])
        return flat.index_select(0, documents.token_places).unflatten(0, documents.shape).transpose(1, 2)

    outputs = []
    for places, mask in documents.groups:
        document_score_mod = score_mod and score_in_documents(score_mod, places, documents.shape[1])
        outputs.append(attend(to_documents(q), to_documents(k), to_documents(v), mask=mask,
                              score_mod=document_score_mod,
                              n_keys=None if n_keys is None else to_documents(n_keys), **options))
    y, rows = zip(*outputs)
    if rows[0] is None:
        return to_rows(y), None
    return to_rows(y), RowStats(*(None if stats[0] is None else to_rows(stats) for stats in zip(*rows)))


def score_in_documents(score_mod, places, T):
    """A score function of documents that are rows by themselves, from one of the rows of T that they are in.
    """
    row, column = places[:, 0] // T, places % T

    def document_score(score, b, h, t, s):
        return score_mod(score, row[b], h, column[b, t], column[b, s])
    document_score.functions = getattr(score_mod, "functions", [score_mod])
    return document_score


# ---- some queries at a time ----

LOGITS_AT_ONCE = 2**21  # over all rows and heads, 8 MB of float32: tried from 2**18 to 2**24 on a CPU
MOST_COMPILED = 8       # portions in a compiled graph, which holds the code of each


def attend_in_portions(compute, q, k, v, mask, n_keys, **options):
    """attend() some queries at a time, each portion by attend_by_logits() or attend_by_flash(), as
    `compute` says.

    A portion reads the keys up to its last query. The last portion, which reads all, is computed first, so
    that each fits where the one before it was: the C library gives a freed place to no request that is as
    large or larger, and in the other order its heap grew to 5 GB at 16,384 tokens. Where there is more than
    one portion and a gradient is wanted, the backward pass computes each of them again, so that what it needs
    is never there for all queries.
    """
    B, H, T, S = *q.shape[:3], k.size(2)
    columns = columns_of(q, k)
    if B * H * T * S <= LOGITS_AT_ONCE:
        return compute(q, k, v, n_keys, columns, mask, **options)
    is_stored = torch.is_tensor(mask)
    is_random = bool(options["dropout"]) or options.get("score_mod") is not None  # or may draw random numbers
    size = max(1, LOGITS_AT_ONCE // (B * H * S))
    if torch.compiler.is_compiling():
        size = max(size, -(-T // MOST_COMPILED))
    portions = []
    for start in reversed(range(0, T, size)):
        portion = slice(start, min(start + size, T))
        # a mask that is stored may show later keys too, as in a layer that is not causal
        n_read = S if is_stored else S - T + portion.stop
        inputs = (q[:, :, portion], k[:, :, :n_read], v[:, :, :n_read],
                  None if n_keys is None else n_keys[..., portion], columns[portion],
                  mask[:, :, portion] if is_stored else mask)
        if torch.is_grad_enabled():
            portions.append(checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=is_random,
                                       **options))
        else:
            portions.append(compute(*inputs, **options))
    y, rows = zip(*reversed(portions))
    y, stats = torch.cat(y, 2), rows[0]
    if stats is not None:
        stats = RowStats(*(s if s is None else torch.cat(parts, -1) for s, parts in zip(stats, zip(*rows))))
    return y, stats


def columns_of(q, k):
    """The columns of the queries, [T, 1]: the last ones."""
    return torch.arange(k.size(2) - q.size(2), k.size(2), device=q.device)[:, None]


def attend_by_flash(q, k, v, n_keys, queries, mask, scale, stats, spread, detach, dropout):
    """A portion by PyTorch's kernel, for a mask that would be T x T."""
    visible = visible_keys(mask, queries, k.size(2))
    visible = visible if visible.dim() == 4 else visible[None, None]
    if not stats:
        return attend_fused(q, k, v, scale, visible, dropout), None
    return row_statistics(q, k, v, scale, visible, n_keys, stats, spread, detach, dropout)


def logits_of(q, k, scale, score_mod, queries):
    """The logits [B, H, T, S] in float32 or better, changed by the score function. queries [T, 1]: their
    columns.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):  # it would round them
        s = q.to(dtype) @ k.to(dtype).mT * scale
    if score_mod is None:
        return s
    b, h = (torch.arange(n, device=q.device) for n in q.shape[:2])
    keys = torch.arange(k.size(2), device=q.device)
    return score_mod(s, b[:, None, None, None], h[:, None, None], queries, keys)


def attend_by_logits(q, k, v, n_keys, queries, mask, scale, score_mod, stats, spread, detach, dropout):
    """A portion whose logits are in memory."""
    s, visible = logits_of(q, k, scale, score_mod, queries), visible_keys(mask, queries, k.size(2))
    masked_logits = s.masked_fill(~visible, -math.inf)
    p = masked_logits.softmax(-1)
    y = F.dropout(p, dropout).to(v.dtype) @ v if dropout else p.to(v.dtype) @ v
    if score_mod is not None and y.device.type == "cpu" and not torch.compiler.is_compiling():
        refuse_wrong_scores(score_mod, masked_logits, y, queries, q, k)
    if not stats:
        return y, None
    if detach:
        s, masked_logits, p = s.detach(), masked_logits.detach(), p.detach()
    lse, entropy, log_p2, squares = masked_logits.logsumexp(-1), None, None, None
    if stats == "shape":
        # where the weight is 0 the logit does not matter
        finite_logits = s.masked_fill(masked_logits == -math.inf, 0.0)
        entropy = (lse - (p * finite_logits).sum(-1)).clamp_min(0)
        log_p2 = p.square().sum(-1).log()
    if spread:
        squares = torch.where(visible, p - 1 / n_keys.to(p.dtype)[..., None], 0.0).square().sum(-1)
    return y, RowStats(lse, entropy, log_p2, squares)


def refuse_wrong_scores(score_mod, masked_logits, y, queries, q, k):
    """ScoreError where outputs are not numbers since a score function gave no number, infinity, or -inf for
    every key that a query sees; queries and keys that are no numbers themselves are another matter.
    """
    if not y.isnan().any() or not (q.isfinite().all() and k.isfinite().all()):
        return
    empty = (masked_logits == -math.inf).all(-1)
    wrong = (masked_logits.isnan() | (masked_logits == math.inf)).any(-1)
    for problem, rows in (("-inf for every key that it sees, and a softmax needs one that is finite", empty),
                          ("a score that is infinite or no number", wrong)):
        for b, h, t in rows.nonzero()[:1].tolist():
            raise ScoreError(score_mod, f"the score function gave query {queries[t].item()} of head {h}, row "
                                        f"{b}, {problem}")


# ---- statistics of the rows by fused kernels ----

def attend_lse(q, k, scale, mask, *values):
    """Attention over one or more values by a kernel that returns each row's log-sum-exp, in float32 or
    better: (log-sum-exp [B, H, T], y, ...). On a GPU mask is a BlockMask, and on a CPU q has several queries.
    """
    if isinstance(mask, BlockMask):
        y, lse = flex(q, k, torch.cat(values, -1), scale, mask)
        return lse, *y.split([v.size(-1) for v in values], -1)
    return CpuFlash.apply(q, k, mask, scale, *values)


def row_statistics(q, k, v, scale, mask, n_keys, stats, spread=False, detach=False, dropout=0.0):
    """attend() with statistics, by kernels that give the log-sum-exp of logits s and never store them.

    entropy = LSE(s) - scale q . SDPA(q, k, k), and log p2 = LSE(2 s) - 2 LSE(s). The spread would be
    sum p^2 - 1/n, but of a nearly uniform row hardly a digit of that is left, so it is taken from the weights
    themselves, in portions.
    """
    squares = None
    if spread:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            _, rows = attend_in_portions(attend_by_logits, q, k, v[..., :0], mask, n_keys, scale=scale,
                                         score_mod=None, stats="lse", spread=True, detach=detach,
                                         dropout=0.0)
        squares = rows.spread
    if stats == "lse":
        lse, y = attend_lse(q, k, scale, mask, v)
        y = attend(q, k, v, scale=scale, mask=mask, dropout=dropout)[0] if dropout else y
        return y, RowStats(lse.detach() if detach else lse, spread=squares)
    # one pass is faster, but on CPU all becomes as wide as v and k, and a GPU has no shared memory beyond 128
    is_small = q.size(2) <= 1024 if q.device.type == "cpu" else k.size(-1) + v.size(-1) <= 128
    one_pass = not detach and not dropout and is_small
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        lse, mean_key, *y = attend_lse(q, k, scale, mask, k.view_as(k), *([v] if one_pass else []))
        lse2 = attend_lse(q, k, 2 * scale, mask, k[..., :0])[0]  # its values do not matter
        mean_logit = scale * (q.to(lse.dtype) * mean_key.to(lse.dtype)).sum(-1)
        entropy = (lse - mean_logit).clamp_min(0).minimum(n_keys.log())
    y = y[0] if one_pass else attend(q, k, v, scale=scale, mask=mask, dropout=dropout)[0]
    log_p2 = lse2 - 2 * lse
    if q.is_cuda and not one_pass:  # gives mean_key a gradient, of 0, where the entropy is not read
        log_p2 = log_p2 + 0.0 * entropy
    return y, RowStats(lse, entropy, log_p2, squares)


# ---- a CPU's kernel with the log-sum-exp ----

class CpuFlash(torch.autograd.Function):
    """Flash attention on CPU that also returns each row's log-sum-exp [B, H, T], with gradients through both.

    PyTorch's CPU kernel computes the log-sum-exp but passes no gradient through it. With P the weights, that
    gradient adds g * P to dS = P * (dO V' - delta), where delta = rowsum(dO * O): the same as lowering delta
    by g. The kernel sums delta up itself, so it gets one column more, in which dO is 1, V is 0 and O is said
    to be -g. Several values, given as a tuple, share one pass over the logits; padded copies, which the
    kernel wants, are not kept for the backward pass.
    """

    @staticmethod
    def forward(ctx, q, k, mask, scale, v, more=None):
        values = (v,) if more is None else (v, more)
        widths = [v.size(-1) for v in values]
        q_, k_, v_, bias = CpuFlash.inputs(q, k, mask, values)
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_, k_, v_, 0.0, mask is None, attn_mask=bias, scale=scale)
        outputs = [t.contiguous() for t in y[..., :sum(widths)].split(widths, -1)]
        ctx.save_for_backward(q, k, mask, lse, *values, *outputs)
        ctx.scale = scale
        return lse, *outputs

    @staticmethod
    def inputs(q, k, mask, values):
        """What the kernel takes: q, k and v of one width, and the mask as something to add to the logits."""
        bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
        v = torch.cat(values, -1)
        width = max(q.size(-1), v.size(-1) + 1)
        return CpuFlash.pad(q, width), CpuFlash.pad(k, width), CpuFlash.pad(v, width), bias

    @staticmethod
    def pad(t, width):
        """t [..., D] with zeros up to `width`. The kernel steps by 1 along the last dimension, whatever its
        stride is.
        """
        t = F.pad(t, (0, width - t.size(-1)))
        return t if t.stride(-1) == 1 else t.contiguous()

    @staticmethod
    def backward(ctx, dlse, *dy):
        q, k, mask, lse, *rest = ctx.saved_tensors
        values, y = rest[:len(dy)], rest[len(dy):]
        widths = [v.size(-1) for v in values]
        q_, k_, v_, bias = CpuFlash.inputs(q, k, mask, values)
        dy = CpuFlash.pad(torch.cat((*dy, torch.ones_like(q[..., :1])), -1), q_.size(-1))
        y = CpuFlash.pad(torch.cat((*y, -dlse[..., None].to(q.dtype)), -1), q_.size(-1))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q_, k_, v_, y, lse, 0.0, bias is None, attn_mask=bias, scale=ctx.scale)
        dv = dv[..., :sum(widths)].split(widths, -1)
        return dq[..., :q.size(-1)], dk[..., :k.size(-1)], None, None, *dv

"""Fine-tuning a trained model: skips that come late, a frozen trunk, documents as rows."""
import os
import signal
from functools import partial

import pytest
import torch
from helpers import TINY, articles, as_arguments, same, tiny, untimed, weights, write_dataset

from model import GPT, GPTConfig, UNet
from nanoheads import checkpoint
from nanoheads.batches import DocumentBatches, PackedBatches
from nanoheads.common import ROOT
from nanoheads.dataset import Dataset
from nanoheads.scoring import score
from train import main

SIZES = dict(block_size=32, vocab_size=256, n_layer=2, n_head=2, n_embd=16)
SKIPS = dict(unet="concat", sentinel="sigmoid", mechanism_lr=0.02, skip_lr=0.005)


@pytest.fixture(scope="module")
def plain(articles_data, tmp_path_factory):
    """The run folder of a plain GPT, trained a little."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    keys = dict(TINY, dataset=articles_data, n_layer=2, block_size=32, out_dir=folder)
    main(as_arguments(keys))
    return folder


@pytest.fixture
def tuned(args, plain, articles_data):
    """tuned(out, **keys) -> the command line of a run over the plain GPT."""
    def make(out, **keys):
        sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"), ...)
        return args(out, **sizes | dict(dataset=articles_data, init_from=plain, lr_decay_iters=20) | keys)
    return make


# ---- late skips ----

def test_the_share_of_the_skips_by_hand():
    def shares(**flags):
        config = GPTConfig(**SIZES, unet="add", **flags)
        return [UNet.share_at_step(config, step) for step in range(7)]
    assert shares() == [1.0] * 7
    assert shares(unet_from=3) == [0, 0, 0, 1, 1, 1, 1]
    assert shares(unet_from=2, unet_ramp=4) == [0, 0, 0.25, 0.5, 0.75, 1, 1]
    assert shares(unet_ramp=2) == [0.5, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("mode", ["concat", "add", "scalar", "published"])
def test_before_they_start_skips_are_off_and_at_the_end_all_there(mode):
    idx = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(1))
    on, off, late = (GPT(GPTConfig(**SIZES, unet=mode, **flags)).double().eval()
                     for flags in ({}, dict(unet_skips=False), dict(unet_from=5, unet_ramp=2)))
    found = []
    with torch.no_grad():
        on_logits, off_logits = on(idx).logits, off(idx).logits
        for step in (4, 5, 6):
            late.at_step(step)
            found.append(late(idx).logits)
    assert torch.equal(found[0], off_logits) and torch.equal(found[2], on_logits)
    assert not any(torch.allclose(found[1], other) for other in (on_logits, off_logits))
    assert late.state_dict().keys() == on.state_dict().keys(), "the schedule is no weight"


@pytest.mark.slow
def test_a_run_starts_its_skips_when_it_is_told_to(tuned, rows, tmp_path, articles_data):
    """Also as it is evaluated, and as its checkpoint is read, which has the skips of its last step."""
    keys = dict(unet="add", unet_init=0.5, init_anyway=True, max_iters=6)
    main(tuned("late", unet_from=2, unet_ramp=8, **keys))
    main(tuned("never", unet_skips=False, **keys))
    (late, late_evals), (never, never_evals) = (rows(tmp_path / out) for out in ("late", "never"))
    assert [a["loss"] == b["loss"] for a, b in zip(late, never)] == [True] * 2 + [False] * 4
    assert [a["val_loss"] == b["val_loss"] for a, b in zip(late_evals, never_evals)] == [True, False, False]
    model = checkpoint.build(checkpoint.read(tmp_path / "late/ckpt.pt"), "late")

    def val_loss():
        nats, n = score(model, Dataset(articles_data), "val", max_tokens=512)
        return nats / n
    assert val_loss() == pytest.approx(late_evals[-1]["val_loss"], abs=1e-6)
    model.at_step(100)
    assert abs(val_loss() - late_evals[-1]["val_loss"]) > 1e-4
    # a run over it has skips from the start, or a beginning of its own
    for out, keys, share in (("all", {}, None), ("own", dict(unet="add", unet_ramp=5), 0.2)):
        main(tuned(out, init_from=tmp_path / "late", max_iters=1, **keys))
        model = checkpoint.build(checkpoint.read(tmp_path / out / "ckpt.pt"), out)
        assert share == (None if model.fuse[0].ramp is None else pytest.approx(model.fuse[0].ramp.item()))


# ---- a frozen trunk ----

@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(optimizer="adamw", weight_decay=0.5),
                                  dict(optimizer="muon", dtype="float16")], ids=str)
def test_a_frozen_trunk_stays_as_it_is_until_it_thaws(keys, plain, tuned, tmp_path):
    keys = dict(keys, unet="concat", xsa=True, unet_ramp=3, freeze_trunk=True, grad_clip=1.0, max_iters=6)
    main(tuned("frozen", **keys))
    main(tuned("thawed", thaw_from=4, **keys))
    trunk, frozen, thawed = (weights(folder) for folder in (
        plain, tmp_path / "frozen/ckpt.pt", tmp_path / "thawed/ckpt.pt"))
    added = [name for name in frozen if name not in trunk]
    assert added and all("xsa" in name or name.startswith("fuse.") for name in added)
    assert same(trunk, {name: frozen[name] for name in trunk})
    assert not any(torch.equal(trunk[name], thawed[name]) for name in trunk)
    for out, steps, count in (("frozen", {6}, len(added)), ("thawed", {2, 6}, len(frozen) - 1)):  # the head's
        moments = [state for each in checkpoint.read(tmp_path / out / "ckpt.pt")["optimizers"]  # is embedding
                   for state in each["state"].values()]
        assert len(moments) == count, "what is frozen has no moments"
        assert {int(state["step"]) for state in moments if "step" in state} == steps


@pytest.mark.slow
@pytest.mark.parametrize("more", [dict(thaw_from=8), dict(thaw_from=12, documents_packed="whole")], ids=str)
def test_20_steps_equal_10_and_10_while_all_of_it_moves(more, tuned, rows, tmp_path, articles_data, capsys):
    """Stopped after ten steps: skips half there, the trunk as the id says, between documents."""
    keys = dict(SKIPS, unet_from=6, unet_ramp=9, freeze_trunk=True, documents=8, grad_accum=2,
                eval_interval=5, max_iters=20, dropout=0.0 if "documents_packed" in more else 0.2, **more)
    main(tuned("once", **keys))
    said = capsys.readouterr().out
    assert "have at least 8 tokens, " in said and "at most 256 tokens a step" in said

    passes = []

    def stop(module, *_):
        if isinstance(module, GPT) and module.training:
            passes.append(1)
            if len(passes) == 20:  # two in each step
                os.kill(os.getpid(), signal.SIGTERM)
    hook = torch.nn.modules.module.register_module_forward_hook(stop)
    with pytest.raises(SystemExit):
        main(tuned("twice", **keys))
    hook.remove()
    assert checkpoint.read(tmp_path / "twice/ckpt.pt")["step"] == 10
    main([*tuned("twice", **keys), "--resume"])
    once, twice = (rows(tmp_path / out) for out in ("once", "twice"))
    assert [untimed(found) for found in once] == [untimed(found) for found in twice]
    assert same(*(weights(tmp_path / out / "ckpt.pt") for out in ("once", "twice")))
    make = PackedBatches if "documents_packed" in more else DocumentBatches
    batches = make(Dataset(articles_data), "train", 32, 8, 1337, 8, False)
    for found in once:
        assert [row["tokens"] for row in found] == [batches.tokens(row["step"]) for row in found]


@pytest.mark.slow
def test_two_ranks_thaw_and_read_documents_as_one_process_does(tuned, rows, tmp_path, free_port):
    keys = dict(SKIPS, unet_from=1, unet_ramp=2, freeze_trunk=True, thaw_from=3, documents=8, batch_size=3,
                grad_accum=4)
    main(tuned("one", **keys))
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
            try:
                main(tuned("two", **keys))
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0]
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two")):
        for a, b in zip(untimed(one), untimed(two), strict=True):
            assert a == pytest.approx(b, abs=1e-5)
    one, two = (weights(tmp_path / out / "ckpt.pt") for out in ("one", "two"))
    assert max((one[k] - two[k]).abs().max() for k in one) < 1e-4


# ---- documents as rows ----

@pytest.mark.slow
def test_documents_in_packed_and_in_padded_rows_are_what_each_is_alone(tmp_path):
    """Losses over a pass, summed, and their gradients; a token weighs the same wherever it stands."""
    splits = dict(train=articles(10, 1), val=articles(4, 2), test=articles(4, 3))
    data, T = Dataset(write_dataset(tmp_path / "few", splits)), 96
    padded = DocumentBatches(data, "train", T, 2, 5, 8)
    packed = PackedBatches(data, "train", T, 1, 5, 8, False)

    def summed(batches):
        model = tiny(acag="headwise", fox=True, short_conv="qkv", **{**SIZES, "block_size": T}).train()
        total = 0.0
        for x, y, *positions in batches:
            loss = model(x, y, **(dict(positions=positions[0]) if positions else {})).loss * (y != -1).sum()
            loss.backward()
            total += loss.item()
        return total, {name: p.grad for name, p in model.named_parameters()}

    def batches_of_a_pass(batches):
        return map(batches, range(int(str(batches).split("a pass is ")[1].split()[0])))

    lengths = [(row, int((row[1:] >= 0).sum())) for ids in batches_of_a_pass(padded) for row in ids]
    assert sum(n for _, n in lengths) == len(data.tokens("train"))  # so that no form leaves out any
    alone, gradients = summed((row[None, :n], row[None, 1:1 + n]) for row, n in lengths)
    for form in (((ids[:, :-1].clamp_min(0), ids[:, 1:]) for ids in batches_of_a_pass(padded)),
                 batches_of_a_pass(packed)):
        total, found = summed(form)
        assert total == pytest.approx(alone, rel=1e-6)
        for name, grad in gradients.items():
            assert torch.allclose(found[name], grad, rtol=0, atol=1e-5 * grad.abs().max().item()), name


@pytest.mark.slow
@pytest.mark.parametrize("packed, change", [
    (None, dict(batch_size=2, grad_accum=4)), ("whole", dict(batch_size=2, grad_accum=4)),
    (None, dict(compile=True))], ids=str)
def test_a_run_over_documents_has_the_same_losses(packed, change, args, articles_data, rows, tmp_path,
                                                      monkeypatch):
    """In portions of the batch, in which rows hold other numbers of tokens; and compiled, for few widths."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return graph
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    keys = dict(dataset=articles_data, block_size=32, documents=4, acag="headwise", batch_size=8)
    keys |= dict(documents_packed=packed) if packed else {}
    main(args("whole", **keys))
    main(args("changed", **{**keys, **change}))
    a, b = (rows(tmp_path / out)[0] for out in ("whole", "changed"))
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], abs=1e-5)
    assert 2 <= len(graphs) <= 4 if "compile" in change else not graphs  # widths of 8, 16, 24 and 32
    torch._dynamo.reset()


# ---- the configs ----

@pytest.mark.slow
@pytest.mark.parametrize("name, flag, more", [
    ("finetune_gpt2", "unet", "--unet_from=1"), ("finetune_gpt_neo_acag", "acag", "--documents=8"),
    ("finetune_smollm2", "xsa", "--block_size=32")])
def test_the_config_runs_over_a_gpt_of_our_own(name, flag, more, plain, articles_data, rows, tmp_path):
    """With the command that stands there, in fewer steps; it begins where the plain GPT ended."""
    text = (ROOT / f"config/{name}.py").read_text()
    command = text.split("python train.py config/")[1].split("\n\n")[0]
    words = command.replace("#", "").replace("\\", "").split()
    assert words[0] == f"{name}.py" and words[1] == "--init_from=out/tiny"
    main([str(ROOT / f"config/{words[0]}"), *words[3:], f"--init_from={plain}", f"--dataset={articles_data}",
          f"--out_dir={tmp_path}/run", "--max_iters=2", "--warmup_iters=1", "--eval_interval=2",
          "--eval_tokens=256", "--device=cpu", more])
    before, after = rows(plain)[1][-1]["val_loss"], rows(tmp_path / "run")[1][0]["val_loss"]
    assert after == pytest.approx(before, abs=0.2)
    config = checkpoint.read(tmp_path / "run/ckpt.pt")["config"]
    assert [key for key in ("unet", "acag", "xsa") if config[key]] == [flag]

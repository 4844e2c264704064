"""Hugging Face folders: one that is read gives the original's logits, one that is written gives ours."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import safetensors
import safetensors.torch
import tokenizers
import torch
from hypothesis import given, settings, strategies as st

import sample
import train
from helpers import (ROOT, TINY, TINY_GPT, alive, byte_pairs, forget_own_mechanisms, write_settings, tiny,
                     write_dataset)
from lab.export_hf import main
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from nanoheads import checkpoint, own_mechanism, pruning, scoring
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.sampling import encode, model_and_tokenizer
from nanoheads.tokenizer import Tokenizer
from lab.hub import huggingface as hf

transformers = pytest.importorskip("transformers", reason="needs transformers: requirements-test.txt")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = dict(block_size=32, vocab_size=61, n_layer=3, n_head=4, n_embd=32)
GPT2 = dict(vocab_size=61, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
NEO = dict(vocab_size=61, max_position_embeddings=32, hidden_size=32, num_layers=4, num_heads=4,
           window_size=5, attention_types=[[["global", "local"], 2]], bos_token_id=0, eos_token_id=0)
LLAMA = dict(vocab_size=61, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             intermediate_size=64, max_position_embeddings=32, pad_token_id=None, eos_token_id=0,
             initializer_range=0.2)
STRETCHED = dict(rope_type="llama3", rope_theta=50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0,
                 original_max_position_embeddings=16)
ORIGINALS = {  # name: (family, fields of its config)
    "gpt2": ("GPT2", GPT2),
    "gpt2, other fields": ("GPT2", dict(GPT2, n_inner=48, activation_function="gelu",
                                        tie_word_embeddings=False, scale_attn_weights=False,
                                        scale_attn_by_inverse_layer_idx=True)),
    "gpt_neo": ("GPTNeo", NEO),
    "gpt_neo, all global": ("GPTNeo", dict(NEO, attention_types=[[["global"], 4]], intermediate_size=40)),
    "llama": ("Llama", LLAMA),
    "llama, other fields": ("Llama", dict(LLAMA, rope_parameters=STRETCHED, rms_norm_eps=1e-3, head_dim=12,
                                          tie_word_embeddings=True, num_key_value_heads=6)),
    "mistral": ("Mistral", dict(LLAMA, sliding_window=None)),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", dict(LLAMA, head_dim=16)),
}
IDS = torch.randint(1, 61, (2, 32), generator=torch.Generator().manual_seed(1))


def original(family, fields):
    config = getattr(transformers, f"{family}Config")(**fields)
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return alive(getattr(transformers, family + kind)(config)).eval()


def ours(path):
    return checkpoint.build(checkpoint.read(path), path)


def apart(model, other, ids=IDS):
    """The largest difference between two models' logits, as a share of the largest logit."""
    with torch.no_grad():
        got, want = model(ids).logits, other(ids).logits
    assert want.std() > 0.05
    return ((got - want).abs().max() / want.abs().max()).item()


def refused(path, *words):
    with pytest.raises(UserError) as e:
        ours(path)
    said = str(e.value)
    assert "\n" not in said and all(word in said for word in words), said


def edit(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# ---- in ----

@pytest.mark.slow
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_folder_read_says_what_the_original_says(name, tmp_path):
    there = original(*ORIGINALS[name])
    there.save_pretrained(tmp_path)
    here, prompt = ours(tmp_path), IDS[:, :9]
    assert apart(here, there) < 1e-5
    with torch.no_grad():
        want = there.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(here.generate(prompt, 12, temperature=0), want)  # through our cache and theirs


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "gpt2"
    original(*ORIGINALS["gpt2"]).save_pretrained(folder)
    return folder


def test_files_in_every_layout_are_read(gpt2_folder, tmp_path):
    """Names without a prefix and tables of masks, as of old; shards; half precision; PyTorch's own format."""
    there, old = transformers.AutoModelForCausalLM.from_pretrained(gpt2_folder).eval(), tmp_path / "old"
    shutil.copytree(gpt2_folder, old)
    tensors = safetensors.torch.load_file(old / "model.safetensors")
    tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    safetensors.torch.save_file(tensors, old / "model.safetensors")
    there.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    for folder in ("old", "shards"):
        assert apart(ours(tmp_path / folder), there) < 1e-5
    shard = sorted((tmp_path / "shards").glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path / "shards", shard.name)
    there.bfloat16().save_pretrained(half := tmp_path / "half")
    there = there.float()
    assert ours(half).lm_head.weight.dtype == torch.float32 and apart(ours(half), there) < 1e-5
    (half / "model.safetensors").unlink()
    torch.save(there.bfloat16().state_dict(), half / "pytorch_model.bin")
    assert apart(ours(half), there.float()) < 1e-5


def test_from_pretrained_gives_gpt2_as_nanogpts_does(gpt2_folder, monkeypatch):
    monkeypatch.chdir(gpt2_folder.parent)
    model = GPT.from_pretrained("gpt2", dict(dropout=0.25))
    assert model.training and model.config.dropout == 0.25
    assert apart(model.eval(), transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()) < 1e-5
    with pytest.raises(ValueError, match="may set dropout alone"):
        GPT.from_pretrained("gpt2", dict(n_layer=1))


def weights_changed(change):
    def act(folder):
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return act


def written_to(name, data):
    return lambda folder: (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def edited(**fields):
    return lambda folder: edit(folder, **fields)


def no_weights_but_a_bin(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


FAULTS_OF_A_FOLDER = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors"]),
    "a .bin of code": (no_weights_but_a_bin, ["transformers cannot read it as a gpt2 model"]),
    "config": (written_to("config.json", "{"), ["config.json", "JSON"]),
    "family": (edited(model_type="bloom"), ["bloom", "gpt2", "gpt_neo"]),
    "a tensor less": (weights_changed(lambda t: t.pop("transformer.h.1.mlp.c_fc.weight")),
                      ["h.1.mlp.c_fc.weight"]),
    "a tensor more": (weights_changed(lambda t: t.update({"transformer.h.0.adapter.weight": torch.ones(2)})),
                      ["h.0.adapter.weight"]),
    "another size": (edited(n_positions=16), ["another size of the tensor transformer.wpe.weight"]),
    "NaN": (weights_changed(lambda t: t["transformer.h.1.mlp.c_fc.weight"][3].fill_(float("nan"))),
            ["h.1.mlp.c_fc.weight", "NaN"]),
    "eps": (edited(layer_norm_epsilon=1e-6), ["layer_norm_epsilon=1e-06"]),
    "quantised": (edited(quantization_config=dict(quant_method="bitsandbytes")), ["quantis"]),
    "vocabulary": (written_to("vocab.json", json.dumps(dict(zip("abc", (0, 1, 99))))), ["tokenizer.json"]),
    "more tokens": (written_to("tokenizer.json", json.dumps(hf.own_tokenizer(dict(encoding="byte")))),
                    ["256", "61"]),
    "tokenizer": (written_to("tokenizer.json", "{}"), ["tokenizer files", "damaged"]),
    "unigram": (written_to("tokenizer.json", json.dumps(dict(model=dict(vocab=[["the", -1.0]])))),
                ["tokenizer", "byte pairs"]),
}


@pytest.mark.parametrize("what", FAULTS_OF_A_FOLDER)
def test_what_is_wrong_with_a_folder_is_one_line(what, gpt2_folder, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    act, words = FAULTS_OF_A_FOLDER[what]
    act(folder)
    refused(folder, *words)


@pytest.mark.parametrize("name, fields, words", [
    ("llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)), ["'yarn'", "llama3"]),
    ("llama", dict(attention_bias=True), ["attention_bias=True"]),
    ("mistral", dict(sliding_window=16), ["sliding_window=16"])], ids=str)
def test_what_a_llama_has_that_ours_has_not_is_one_line(name, fields, words, tmp_path):
    family, its = ORIGINALS[name]
    of_file = "rope_parameters" in fields  # which transformers refuses itself, in part
    original(family, its if of_file else {**its, **fields}).save_pretrained(tmp_path)
    edit(tmp_path, **fields if of_file else {})
    refused(tmp_path, *words)


NONSENSE = st.recursive(st.none() | st.booleans() | st.integers(-5, 99) | st.just(10**400) | st.floats() |
                        st.text(max_size=4), lambda inner: st.lists(inner, max_size=2) |
                        st.dictionaries(st.text(max_size=4), inner, max_size=2), max_leaves=3)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.data())
def test_whatever_json_stands_in_a_folder_it_is_a_model_or_a_line(gpt2_folder, tmp_path_factory, data):
    """Any value in the place of a field of the config, of a tokenizer's ids, or of a whole file."""
    folder = shutil.copytree(gpt2_folder, tmp_path_factory.mktemp("any") / "gpt2")
    name = data.draw(st.sampled_from(["field", "config.json", "tokenizer.json", "vocab.json"]))
    if name == "field":
        fields = json.loads((folder / "config.json").read_text())
        edit(folder, **{data.draw(st.sampled_from(["vocab_size", *sorted(fields)])): data.draw(NONSENSE)})
    elif data.draw(st.booleans()):
        ids = data.draw(st.dictionaries(st.text(max_size=2), NONSENSE, max_size=3) | NONSENSE)
        text = json.dumps(ids if name != "tokenizer.json" else dict(model=dict(vocab=ids, merges=[])))
        (folder / name).write_text(data.draw(st.sampled_from([text, text[:-1], "", "\0"])))
    else:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
    try:
        ours(folder)
    except UserError as e:
        assert "\n" not in str(e)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_may_not_be_read_says_so(name, gpt2_folder, unreadable, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    (folder / "tokenizer.json").write_text("{}")
    folder = unreadable(folder, name)
    refused(folder, f"{folder / name} cannot be read: Permission denied")


def test_without_transformers_a_line_says_what_to_install(gpt2_folder, tmp_path, monkeypatch):
    """What was written for our own class is read without it."""
    model = tiny(**SIZES, **MECHANISMS["acag"]).float()
    hf.export(model, None, tmp_path / "ours")
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for path in (gpt2_folder, "gpt2"):
        refused(path, f"{path} is read by transformers, which is missing: pip install transformers")
    assert apart(ours(tmp_path / "ours"), model) < 1e-6


def test_names_of_the_hub_and_a_hub_out_of_reach(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("distilgpt2", "EleutherAI/gpt-neo-125m"):
        refused(name, f"no checkpoint {name}", "give that folder")
    for path in ("nowhere", "out/a", "runs/a", "gpt2.pt", "gpt2/ckpt.pt", "a/b/c", "./a", "/a/b"):
        assert not hf.is_name(path)
        refused(path, "no checkpoint")


@pytest.mark.slow
def test_a_name_of_the_hub_is_read_from_what_was_downloaded(gpt2_folder, monkeypatch, tmp_path):
    """As from a folder; a folder of that name, where there is one, comes first."""
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download",
                        lambda name, **more: asked.append(name) or gpt2_folder)
    monkeypatch.chdir(tmp_path)
    assert apart(ours("distilgpt2"), ours(gpt2_folder)) == 0 and asked == ["distilgpt2"]
    other = original("GPT2", dict(GPT2, n_layer=1))
    other.save_pretrained(tmp_path / "distilgpt2")
    assert apart(ours("distilgpt2"), other) < 1e-5 and asked == ["distilgpt2"]


# ---- from there to a run ----

@pytest.mark.slow
def test_a_run_starts_from_a_folder_with_mechanisms_neutral(tmp_path, bytes_data):
    there = original("GPTNeo", dict(NEO, vocab_size=256))
    there.save_pretrained(tmp_path / "neo")
    args = [f"--{key}={value}" for key, value in TINY.items() if not key.startswith(("n_", "block"))]
    args += [f"--dataset={bytes_data}", f"--init_from={tmp_path / 'neo'}", "--acag=headwise"]
    train.main([*args, f"--out_dir={tmp_path / 'run'}", "--max_iters=1", "--eval_interval=1",
                "--adamw_lr=1e-12", "--min_lr=0", "--warmup_iters=0"])
    model = ours(tmp_path / "run")
    assert model.config.acag == "headwise" and model.config.window_layers == [1, 3]
    assert apart(model, there) < 1e-4  # a step of no length away
    with pytest.raises(SystemExit, match="no neutral setting"):
        train.main([*args, f"--out_dir={tmp_path / 'other'}", "--key_offset=True"])


# what nanoGPT's config file of that name sets, but for its names on Weights & Biases
FINETUNE_SHAKESPEARE = dict(
    out_dir="out-shakespeare", eval_interval=5, eval_iters=40, wandb_log=False, dataset="shakespeare",
    init_from="gpt2-xl", always_save_checkpoint=False, batch_size=1, gradient_accumulation_steps=32,
    max_iters=20, learning_rate=3e-5, decay_lr=False)


@pytest.mark.slow
def test_openais_weights_are_found_by_their_short_names(tmp_path, monkeypatch, bytes_data, rows, capsys):
    """Evaluated, fine-tuned and sampled from, as nanoGPT's config files and command lines ask for them."""
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2-medium", "gpt2-xl"):
        original("GPT2", dict(GPT2, vocab_size=256)).save_pretrained(name)
        for file, text in hf.tokenizer_files(dict(encoding="byte"), 32).items():
            (tmp_path / name / file).write_text(text)
    data = [f"--dataset={bytes_data}", "--device=cpu"]
    train.main(["config/eval_gpt2_medium.py", *data, "--eval_tokens=64"])
    assert "nats/token" in capsys.readouterr().out and not (tmp_path / "out").exists()
    for config in ("config/finetune_shakespeare.py",
                   write_settings(tmp_path / "finetune.py", FINETUNE_SHAKESPEARE)):
        shutil.rmtree(tmp_path / "out-shakespeare", ignore_errors=True)
        train.main([config, *data, "--max_iters=2", "--grad_accum=2", "--eval_interval=2", "--eval_tokens=64",
                    "--log_interval=1"])
        assert [row["adamw_lr"] for row in rows("out-shakespeare")[0]] == [3e-5, 3e-5]
    capsys.readouterr()
    sample.main(["--init_from=gpt2-xl", "--start=What is it?", "--num_samples=2", "--max_new_tokens=4"])
    said = capsys.readouterr()
    assert said.out.count("==== sample") == 2 and "--init_from gpt2-xl means --ckpt gpt2-xl" in said.err


# ---- out ----

def mixtures():
    """{number: flags}: few models that have every entry of MECHANISMS between them."""
    found = []
    for flags in MECHANISMS.values():
        fits = (each for each in found if not each.keys() & flags.keys() and
                not GPTConfig(**{**TINY_GPT, **SIZES, **each, **flags}).problems())
        if (each := next(fits, None)) is None:
            found.append(each := dict(recipe="modern"))
        each.update(flags)
    return {f"mixture {i}": flags for i, flags in enumerate(found)}


WRITTEN = {"gpt2": dict(recipe="gpt2"),
           "gpt2, all biases": dict(recipe="gpt2", bias=True, act="gelu_tanh", tied=False, n_inner=48),
           "modern, other heads": dict(recipe="modern", head_dim=6),
           "modern, qk_max": dict(recipe="modern", qk_max=12.0),
           "modern, capped": dict(recipe="modern", softcap=15.0, tied=True, rope_base=500.0),
           "llama": dict(recipe="llama", n_kv_head=2, norm_eps=1e-3),
           "llama, stretched": dict(recipe="llama", rope_scaling=[4.0, 1.0, 3.0, 16.0], tied=True,
                                    head_dim=6),
           "qwen2": dict(recipe="llama", qkv_bias=True, n_kv_head=1),
           "qwen3": dict(recipe="llama", qk_norm=True, qk_scale=True),
           "parallel": dict(recipe="gpt2", pos="rope", rope_share=0.25, parallel=True),
           "all on": dict(recipe="gpt2", **ALL_ON, n_embd=64),
           **mixtures()}
CLASSES = {"gpt2": "GPT2LMHeadModel", "gpt2, all biases": "GPT2LMHeadModel",
           "modern, other heads": "NanoChatForCausalLM", "modern, capped": "NanoChatForCausalLM",
           "llama": "LlamaForCausalLM", "llama, stretched": "LlamaForCausalLM",
           "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def written(model, folder, meta=None, **options):
    """(what export() says, the model as transformers loads it)."""
    said = hf.export(model, meta, folder, **options)
    own = said[0] == "nanoheads"
    return said, transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=own).eval()


def same_everywhere(model, there):
    assert apart(there, model) < 1e-5
    prompt = IDS[:, :9]
    want = model.generate(prompt, 6, temperature=0)
    for use_cache in (True, False):
        got = there.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=use_cache, pad_token_id=0)
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_says_what_we_say(name, tmp_path):
    model = tiny(**{**SIZES, **WRITTEN[name]}).float()
    said, there = written(model, tmp_path / "out")
    assert type(there).__name__ == CLASSES.get(name, "NanoHeadsForCausalLM")
    same_everywhere(model, there)
    if said[0] != "nanochat":  # which is written alone
        assert apart(ours(tmp_path / "out"), model) < 1e-6  # and read back


OLD, NEW = ("rope_theta", "rope_scaling"), ("rope_parameters",)  # of transformers 4 and 5, in config.json


def test_versions_4_and_5_of_transformers_read_the_same_positions(tmp_path):
    """A folder holds what each of them reads, and either form alone is read here as well."""
    model = tiny(**{**SIZES, **WRITTEN["llama, stretched"]}, rope_base=50).float()
    hf.export(model, None, tmp_path / "both")
    config = json.loads((tmp_path / "both/config.json").read_text())
    assert config["rope_parameters"] == {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    assert config["rope_theta"] == 50.0 and isinstance(config["rope_theta"], float)  # as version 4 wants them
    for key, value in config["rope_scaling"].items():
        assert key == "rope_type" or type(value) is (int if key.startswith("original") else float)
    for gone in (OLD, NEW):
        folder = shutil.copytree(tmp_path / "both", tmp_path / gone[0])
        left = {key: value for key, value in config.items() if key not in gone}
        (folder / "config.json").write_text(json.dumps(left))
        there = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert apart(there, model) < 1e-5 and apart(ours(folder), model) < 1e-6


@pytest.mark.slow
def test_tables_that_no_file_holds_are_made_anew(tmp_path, monkeypatch):
    """Whatever lies in the memory in which transformers builds a model."""
    flags = {key: value for name in ("agency", "key_offset", "roles", "window_global_random")
             for key, value in MECHANISMS[name].items()}
    model, empty = tiny(**{**SIZES, **flags}, recipe="modern").float(), torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **more: empty(*args, **more).fill_(1))
    _, there = written(model, tmp_path / "hf")
    tables = dict(there.gpt.named_buffers())
    lost = set(tables) - set(model.state_dict())
    assert lost and all(torch.equal(tables[key], t) for key, t in model.named_buffers() if key in lost)
    assert apart(model, there) < 1e-6


@pytest.mark.slow
def test_pruned_models_and_another_class_than_the_plainest(tmp_path):
    model = tiny(**SIZES).float()
    said, there = written(model, tmp_path / "own", family="nanoheads")
    assert said == ("nanoheads", "")
    same_everywhere(model, there)
    pruning.prune_heads(model, {0: [1, 2], 2: [0, 1, 2, 3]})
    said, there = written(model, tmp_path / "pruned")
    assert said == ("nanoheads", "heads were pruned")
    same_everywhere(model, there)
    assert sum(p.numel() for p in there.parameters()) == model.num_params()
    with pytest.raises(UserError, match="this model is no gpt2: heads were pruned"):
        hf.export(model, None, tmp_path / "no", family="gpt2")
    assert not (tmp_path / "no").exists()


def test_late_skips_are_written_once_they_have_risen(tmp_path):
    model = tiny(**SIZES, unet="concat", unet_from=5, unet_ramp=4).float()
    model.at_step(6)
    with pytest.raises(UserError, match="train beyond step 9"):
        hf.export(model, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model.at_step(100)
    hf.export(model, None, tmp_path / "out")
    assert apart(ours(tmp_path / "out"), model) < 1e-6


FLAGS = dict(MECHANISMS["constraint_a"], **MECHANISMS["key_offset"], acag="headwise")


@pytest.mark.slow
def test_as_a_model_of_transformers(tmp_path):
    """Labels, beams, padded prompts, save_pretrained and back, more tokens, another dtype."""
    model = tiny(**SIZES, **FLAGS, recipe="modern").float()
    _, there = written(model, tmp_path / "out")
    row = IDS[:1, :7]
    with torch.no_grad():
        out = there(IDS, labels=IDS)
        shifted = model(IDS[:, :-1], IDS[:, 1:])
        assert torch.allclose(out.loss, shifted.loss, atol=1e-5)
        # Trainer divides by what a whole batch scores, and believes a forward pass that takes **kwargs
        parts = [there(ids, labels=ids, num_items_in_batch=torch.tensor(62)).loss for ids in IDS.split(1)]
        assert torch.allclose(sum(parts), shifted.loss, atol=1e-5)
        assert there(IDS, logits_to_keep=1).logits.shape == (2, 1, 61)
    both = torch.cat((torch.cat((torch.zeros(1, 4, dtype=torch.long), row), 1), IDS[1:, :11]))
    masks = (torch.arange(11) >= torch.tensor([[4], [0]])).long()
    got = there.generate(both, attention_mask=masks, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(got[:1, 4:], model.generate(row, 8, temperature=0))
    beams = [there.generate(row, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=cached,
                            pad_token_id=0) for cached in (True, False)]
    assert torch.equal(*beams)
    places = torch.arange(IDS.size(1))
    assert torch.equal(there(IDS, position_ids=places[None]).logits, there(IDS).logits)
    for words, how in (("no packed documents", dict(position_ids=places[None] % 5)),
                       ("the cache is a DynamicCache", dict(past_key_values=transformers.DynamicCache()))):
        with pytest.raises(ValueError, match=words):
            there(IDS, **how)
    with pytest.raises(ValueError, match="pad left to generate"):
        there.generate(both.flip(1), attention_mask=masks.flip(1), max_new_tokens=2, pad_token_id=0)

    def loaded(name, **options):
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True,
                                                                 **options).eval()

    there.save_pretrained(tmp_path / "again")
    again = loaded("again")
    assert apart(again, model) < 1e-5
    again.resize_token_embeddings(64)
    again.save_pretrained(tmp_path / "more tokens")
    more = loaded("more tokens")
    assert torch.equal(more(IDS).logits, again(IDS).logits) and more(IDS).logits.size(-1) == 64
    assert apart(ours(tmp_path / "more tokens"), more) < 1e-5
    half = loaded("out", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and apart(half, model) < 0.1


def test_rows_of_a_padded_batch_have_the_logits_of_each_alone(tmp_path):
    """Padding is at either end or at both, in masks of numbers and of booleans; a hole is refused."""
    model = tiny(**SIZES, **FLAGS).float()
    _, there = written(model, tmp_path / "out")
    places = [(0, 32), (13, 32), (25, 32), (0, 7), (3, 20)]
    rows, mask = torch.zeros(5, 32, dtype=torch.long), torch.zeros(5, 32, dtype=torch.long)
    for i, (start, stop) in enumerate(places):
        rows[i, start:stop], mask[i, start:stop] = IDS[0, :stop - start], 1
    with torch.no_grad():
        logits, blind = there(rows, attention_mask=mask).logits, there(rows).logits
        assert torch.equal(there(rows, attention_mask=mask.bool()).logits, logits)
        for i, (start, stop) in enumerate(places):
            want = model(IDS[:1, :stop - start]).logits[0]
            assert torch.allclose(logits[i, start:stop], want, atol=1e-5)
            assert torch.allclose(blind[i, start:stop], want, atol=1e-2) == (start == 0)
    for hole in ([1, 1, 0, 1, 1], [0, 1, 0, 1, 1]):
        with pytest.raises(ValueError, match="zeros inside a row's text"):
            there(IDS[:1, :5], attention_mask=torch.tensor([hole]))


# ---- the code in a folder ----

class Absent:
    """Of sys.meta_path: this repository is not there to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("model", "nanoheads", "lab"):
            raise ModuleNotFoundError(name)


def test_a_folder_needs_nothing_of_this_repository(tmp_path, monkeypatch):
    """Its first file names every other one: transformers 4 copies what it imports, and nothing beyond."""
    model = tiny(**SIZES, **MECHANISMS["acag"]).float()
    hf.export(model, None, tmp_path / "out")
    named = re.findall(r"^from \.(\w+) import", (tmp_path / "out/modeling_nanoheads.py").read_text(), re.M)
    assert {*named, "modeling_nanoheads"} == {path.stem for path in (tmp_path / "out").glob("*.py")}
    for name in [name for name in sys.modules if name.partition(".")[0] in ("model", "nanoheads", "lab")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert apart(there.eval(), model) < 1e-5


def test_imports_of_an_own_mechanism_lead_into_its_folder_or_are_refused(mine, tmp_path):
    """Else the folder has no such module, or finds another class of the same name where the repository is."""
    good = "import model\nimport model as m\nfrom nanoheads import kernels\n"
    own_mechanism.add(mine("import torch\n", f"import torch\n{good}"))
    hf.export(tiny(**SIZES, forget=True).float(), None, tmp_path / "out")
    code = (tmp_path / "out/own_mechanism_0.py").read_text()
    assert code.count("from . import") == 3 and not re.search(r"^(import|from) (model|nanoheads)", code, re.M)
    forget_own_mechanisms()
    own_mechanism.add(mine("import torch\n", "import torch\nfrom nanoheads.common import UserError\n"))
    with pytest.raises(UserError, match="cannot hold its import of nanoheads"):
        hf.export(tiny(**SIZES, forget=True).float(), None, tmp_path / "no")


# ---- tokenizers ----

TEXT = "Hello  world,\n\n it's naïve — 12345 ok \U0001f600\t\n  end "


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["byte", "char", "gpt2", "hf"])
def test_tokenizers_come_along(encoding, tmp_path, request):
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    vocab = {"char": sorted(set(TEXT)), "hf": byte_pairs(TEXT * 9, r"\s?\w+")}.get(encoding)
    tok = Tokenizer(encoding, vocab)
    want = tok.encode(TEXT)
    meta = dict(name="x", encoding=encoding, **({"vocab": vocab} if vocab else {}))
    hf.export(GPT(GPTConfig(**{**SIZES, "vocab_size": tok.vocab_size})), meta, tmp_path / "out")
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert there.encode(TEXT, add_special_tokens=False) == want.tolist()
    assert there.decode(want.tolist()) == tok.decode(want) == TEXT
    there.save_pretrained(tmp_path / "again")  # in whatever form
    shutil.copy(tmp_path / "out" / "config.json", tmp_path / "again")
    shutil.copy(tmp_path / "out" / "model.safetensors", tmp_path / "again")
    for folder in ("out", "again"):
        meta = checkpoint.read(tmp_path / folder)["meta"]
        assert meta["encoding"] == encoding
        assert Tokenizer.from_meta(meta).encode(TEXT).tolist() == want.tolist()


def sentencepiece(prepends):
    """A tokenizer.json as of Llama 2 or Mistral: byte pairs over characters, a token for each byte.

    prepends: "normalizer" (Llama 2) or "pre_tokenizer" (Mistral): what puts a space before the text.
    """
    model = tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    own = tokenizers.Tokenizer(model)
    if prepends == "normalizer":
        own.normalizer = tokenizers.normalizers.Sequence([
            tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")])
    else:
        own.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("\u2581", "first", False)
    own.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)])
    each = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, show_progress=False,
                                             special_tokens=["<unk>", "<s>", "</s>", *each])
    own.train_from_iterator([TEXT.replace(" ", "\u2581")] * 9, trainer)
    about = json.loads(own.to_str())
    about["added_tokens"] = about["added_tokens"][:3]
    return about


def published_tokenizer(kind):
    """The text of a tokenizer.json that puts <s> before a text; SentencePiece's kinds put a space, too."""
    text = byte_pairs("the river " * 9, special=("<s>", "</s>"))
    about = json.loads(text) if kind == "bytes" else sentencepiece(kind)
    first = next(token["id"] for token in about["added_tokens"] if token["content"] == "<s>")
    template = [dict(SpecialToken=dict(id="<s>", type_id=0)), dict(Sequence=dict(id="A", type_id=0))]
    return json.dumps(dict(about, post_processor=dict(
        type="TemplateProcessing", single=template, pair=template,
        special_tokens={"<s>": dict(id="<s>", ids=[first], tokens=["<s>"])})))


KINDS = pytest.mark.parametrize("kind", ["bytes", "normalizer"])


@KINDS
def test_an_exported_tokenizer_gives_the_ids_of_the_run(kind, tmp_path):
    """The same greedy text, too, and an end at which generate() stops."""
    vocab = published_tokenizer(kind)
    tok = Tokenizer("hf", vocab)
    model = tiny(**{**SIZES, "vocab_size": tok.vocab_size}, recipe="llama").float()
    _, there = written(model, tmp_path / "out", dict(name="x", encoding="hf", vocab=vocab))
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the the", " the", "a\n the", "the</s>the"):
        assert ids(text)["input_ids"] == tok.encode(text, special=True).tolist()
        assert ids.decode(tok.encode(text)) == text
    prompt = torch.tensor([ids("the the")["input_ids"]])
    said = there.generate(prompt, max_new_tokens=20, do_sample=False)[0, 2:].tolist()
    assert said == model.generate(prompt, 20, temperature=0, stop_token=tok.end)[0, 2:].tolist()
    assert there.generation_config.eos_token_id == there.config.eos_token_id == ids.eos_token_id == tok.end


@KINDS
def test_a_published_models_text_begins_as_its_tokenizer_says(kind, tmp_path, capsys):
    """What AutoTokenizer gives: in a prompt, and before the first token that is scored."""
    folder, vocab = tmp_path / "llama", published_tokenizer(kind)
    there = original("Llama", dict(LLAMA, vocab_size=999))
    there.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(vocab)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    model, tok = model_and_tokenizer(str(folder), "cpu")
    ids = encode(tok, "the the", folder)
    assert ids.tolist() == [transformers.AutoTokenizer.from_pretrained(folder)("the the")["input_ids"]]
    assert encode(tok, "", folder)[0, 0] == ids[0, 0] == tok.first
    data = write_dataset(tmp_path / "data", {s: "the the" * 9 for s in ("train", "val", "test")}, "hf", vocab)
    report = scoring.evaluate(folder, "val", 0, "cpu", str(data), max_tokens=32, progress=False)
    with torch.no_grad():
        first = torch.tensor([[tok.first, *Dataset(data).tokens("val")[:32].tolist()]])
        want = there(first[:, :-1], labels=None).logits.log_softmax(-1).gather(-1, first[:, 1:, None])
    assert report["nats_per_token"] == pytest.approx(-want.mean().item(), rel=1e-4)
    assert "before the text stands <s>, as its tokenizer puts it" in capsys.readouterr().err
    hf.export(model, checkpoint.read(folder)["meta"], tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_text() == vocab


@pytest.mark.parametrize("prepends", ["normalizer", "pre_tokenizer"])
def test_tokens_of_sentencepiece_spell_the_texts_bytes(prepends):
    """Those of the tokenizer itself, but for the space that it puts before a text; unknown characters too."""
    about = sentencepiece(prepends)
    text = f"{TEXT} naïve — 日本語 😀\r\n\x00\t  two spaces, <s> </s> as text, <0x41>"
    tok = Tokenizer("hf", json.dumps(about))
    ids = tok.encode(text)
    assert b"".join(tok.decode_bytes([i]) for i in ids) == tok.decode_bytes(ids) == text.encode()
    theirs = tokenizers.Tokenizer.from_str(json.dumps(about))
    theirs.encode_special_tokens = True
    with_space = theirs.encode("x" + text, add_special_tokens=False).ids
    assert tok.decode_bytes(with_space) == b" x" + text.encode()
    assert tok.encode(" x" + text).tolist() == with_space, "a text that begins with a space: the same tokens"
    with pytest.raises(ValueError, match="which this vocabulary writes for a space"):
        tok.encode("a\u2581b")
    del about["model"]["vocab"]["<0x41>"]
    with pytest.raises(ValueError, match="has the byte 0x41, for which"):
        Tokenizer("hf", json.dumps(about)).encode("A")


def test_a_tokenizer_cuts_pads_and_loses_nothing():
    """transformers keeps a caller's truncation and padding in tokenizer.json; a text is whole here."""
    about = hf.own_tokenizer(dict(encoding="byte"))
    text, plain = "the cat sat", Tokenizer("hf", json.dumps(about))
    about["truncation"] = dict(direction="Right", max_length=3, strategy="LongestFirst", stride=0)
    about["padding"] = dict(strategy=dict(Fixed=20), direction="Right", pad_to_multiple_of=None, pad_id=5,
                            pad_type_id=0, pad_token="x")
    assert Tokenizer("hf", json.dumps(about)).encode(text).tolist() == plain.encode(text).tolist()
    del about["model"]["vocab"]["a"]
    few = Tokenizer("hf", json.dumps(about))
    assert few.decode(few.encode("the mt")) == "the mt"
    with pytest.raises(ValueError, match="has the byte 0x61, for which this vocabulary has no token"):
        few.encode("the mat")
    about["model"]["vocab"]["b"] = -1
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        Tokenizer("hf", json.dumps(about))


def test_a_vocabulary_is_the_same_in_another_layout_and_another_one_is_refused():
    """Another order of keys, and what a program writes that reads it; other merges make another one."""
    vocab = published_tokenizer("normalizer")
    about = json.loads(vocab)
    turned = json.dumps(dict(reversed(about.items())), indent=3)
    again = tokenizers.Tokenizer.from_str(vocab).to_str(pretty=True)
    old = dict(meta=dict(name="x", encoding="hf", vocab=vocab, vocab_size=0), config=dict(vocab_size=999))
    for text in (turned, again):
        new = SimpleNamespace(vocab_size=0, meta=dict(old["meta"], vocab=text))
        assert text != vocab and checkpoint.check_vocabulary(old, new, "x") is None
    about["model"]["merges"].reverse()
    for meta in (dict(vocab=json.dumps(about)), dict(vocab="damaged"), dict(encoding="byte", vocab=None)):
        new.meta.update(meta)
        with pytest.raises(UserError, match="whose vocabulary is not that of x"):
            checkpoint.check_vocabulary(old, new, "x")


def test_a_damaged_vocabulary_is_not_written(tmp_path):
    model, meta = tiny(**SIZES).float(), dict(name="x", vocab_size=58, encoding="hf", vocab="{}")
    checkpoint.save(tmp_path / "x.pt", dict(model=model.state_dict(), config=model.config.flags(), meta=meta))
    with pytest.raises(SystemExit, match="x.pt: its vocabulary cannot be read: .*only tokenizers of byte"):
        main(["--ckpt", str(tmp_path / "x.pt"), "--out", str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_gpt2s_files_are_kept_out_of_any_folder_that_has_them(tmp_path, monkeypatch, gpt2_files):
    """So that a GPT-2 folder alone is enough: no network, no other copy of the byte pairs."""
    merges, encoder = (gpt2_files / "gpt2_bpe" / file.name for file in (hf.GPT2_MERGES, hf.GPT2_ENCODER))
    lines = merges.read_text(encoding="utf-8").split("\n")[1:-1]
    ids = json.loads(encoder.read_text(encoding="utf-8"))
    whole = dict(model=dict(vocab=ids, merges=[line.split(" ") for line in lines]))
    for name, content in (("old", {"vocab.json": ids}), ("new", {"tokenizer.json": whole})):
        (tmp_path / name).mkdir()
        for file, data in content.items():
            (tmp_path / name / file).write_text(json.dumps(data))
        shutil.copy(merges, tmp_path / name / "merges.txt") if name == "old" else None
        monkeypatch.setattr(hf, "HOME", tmp_path / f"home {name}")
        (tmp_path / f"home {name}").mkdir()
        assert hf.tokenizer_of(tmp_path / name, dict(vocab_size=50304))["encoding"] == "gpt2"
        for path in (merges, encoder):
            kept = tmp_path / f"home {name}" / path.parent.name / path.name
            assert kept.read_bytes() == path.read_bytes()


# ---- the program ----

@pytest.mark.slow
def test_the_program_writes_a_folder_whole_and_over_nothing_but_such_a_folder(args, tmp_path, refusal, capsys,
                                                                               monkeypatch):
    train.main(args(sentinel="sigmoid"))
    capsys.readouterr()
    run, out = tmp_path / "run", tmp_path / "hf"
    ask = ["--ckpt", str(run), "--out", str(out)]
    main(ask)
    said = capsys.readouterr().out
    assert "nanoheads (sentinel is on)" in said and "tokenizer byte" in said
    assert "trust_remote_code=True" in said
    assert apart(ours(out), ours(run), IDS[:, :16]) < 1e-6
    assert "is there already" in refusal(ask)
    assert "this model is no nanochat: sentinel is on" in refusal([*ask, "--force", "--as", "nanochat"])
    before, model = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}, tiny().float()
    for folder, file in ((run, "best.pt"), (tmp_path / "mine", "thesis.txt")):
        folder.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"hours of work")
        with pytest.raises(UserError, match="is no folder of a model"):
            hf.export(model, None, folder, force=True)
        assert (folder / file).read_bytes() == b"hours of work"

    def full(*args, **options):
        raise safetensors.SafetensorError("No space left on device")

    def interrupted(path, to):
        if to == out and path.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(path, to)

    rename = type(out).rename
    for place, name, stop, words in ((safetensors.torch, "save_file", full, "No space left"),
                                     (type(out), "rename", interrupted, None)):
        with monkeypatch.context() as m, pytest.raises((UserError, KeyboardInterrupt), match=words):
            m.setattr(place, name, stop)
            hf.export(model, None, out, force=True)
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    hf.export(model, None, out, force=True)
    assert hf.config_of(out)["model_type"] == "gpt2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mine", "run"]  # nothing half-written


@pytest.mark.slow
def test_the_programs_of_the_page_run(tmp_path, monkeypatch):
    """Those in Python; exported/a is what a command of the page writes."""
    monkeypatch.chdir(tmp_path)
    hf.export(tiny(vocab_size=256, sentinel="sigmoid", block_size=64).float(),
              dict(name="x", encoding="byte", vocab_size=256), tmp_path / "exported/a")
    page = (ROOT / "docs/hugging-face.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert programs
    for program in programs:
        exec(compile(program, "docs/hugging-face.md", "exec"), {})

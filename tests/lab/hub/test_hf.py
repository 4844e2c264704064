"""Hugging Face folders: read, they say what the original says; written, transformers says what we say."""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch as safetensors
import tokenizers
import torch

import train
from helpers import ROOT, TINY, byte_pairs, write_dataset
from data.prepare_text import main as prepare_text
from lab.export_hf import main
from helpers import alive, tiny
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from nanoheads import checkpoint, configurator, own_mechanism, pruning, scoring
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.sampling import encode, model_and_tokenizer
from nanoheads.tokenizer import Tokenizer, byte_symbols
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


# ---- in ----

@pytest.mark.slow
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_folder_read_says_what_the_original_says(name, tmp_path):
    there = original(*ORIGINALS[name])
    there.save_pretrained(tmp_path)
    here = ours(tmp_path)
    assert apart(here, there) < 1e-5
    prompt = IDS[:, :9]
    with torch.no_grad():
        want = there.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(here.generate(prompt, 12, temperature=0), want)  # through our cache and theirs


@pytest.mark.slow
def test_what_makes_the_families_differ_is_seen(tmp_path):
    """Negative controls: without each of these flags the logits are others."""
    for name, changed in (("gpt_neo", dict(window_layers=[0, 2])), ("gpt_neo", dict(window=6)),
                          ("gpt2", dict(act="gelu")), ("llama, other fields", dict(rope_scaling=None)),
                          ("qwen3", dict(rope_base=500.0))):
        there = original(*ORIGINALS[name])
        there.save_pretrained(tmp_path / name)
        state = checkpoint.read(tmp_path / name)
        assert apart(checkpoint.build(state, "x", **changed), there) > 5e-5, changed  # above: below 1e-5


def test_names_without_prefix_and_mask_tables_of_old_files(tmp_path):
    there = original(*ORIGINALS["gpt2"])
    there.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in safetensors.load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    safetensors.save_file(tensors, path)
    assert apart(ours(tmp_path), there) < 1e-5


def test_sharded_weights_are_read_and_a_missing_file_is_named(tmp_path):
    there = original(*ORIGINALS["gpt2"])
    there.save_pretrained(tmp_path, max_shard_size="60KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2 and not (tmp_path / "model.safetensors").exists()
    assert apart(ours(tmp_path), there) < 1e-5
    files[1].unlink()
    refused(tmp_path, files[1].name)


@pytest.mark.slow
def test_half_precision_and_older_files_are_read(tmp_path):
    half = original(*ORIGINALS["llama"]).bfloat16()
    half.save_pretrained(tmp_path)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert ours(tmp_path).lm_head.weight.dtype == torch.float32
    assert apart(ours(tmp_path), there) < 1e-5
    (tmp_path / "model.safetensors").unlink()
    torch.save(half.state_dict(), tmp_path / "pytorch_model.bin")
    assert apart(ours(tmp_path), there) < 1e-5


def test_without_transformers_a_line_says_what_to_install(gpt2_folder, tmp_path, monkeypatch):
    """What was written for our own class is read without it."""
    model = tiny(**SIZES, **MECHANISMS["acag"]).float()
    hf.export(model, None, tmp_path / "ours")
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for path in (gpt2_folder, "gpt2"):
        refused(path, f"{path} is read by transformers, which is missing: pip install transformers")
    assert apart(ours(tmp_path / "ours"), model) < 1e-6


def refused(path, *words):
    with pytest.raises(UserError) as e:
        checkpoint.build(checkpoint.read(path), path)
    said = str(e.value)
    assert "\n" not in said and all(word in said for word in words), said


def edit(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "gpt2"
    original(*ORIGINALS["gpt2"]).save_pretrained(folder)
    return folder


def test_from_pretrained_gives_gpt2_as_nanogpts_does(gpt2_folder, monkeypatch):
    monkeypatch.chdir(gpt2_folder.parent)
    model = GPT.from_pretrained("gpt2", dict(dropout=0.25))
    assert model.training and model.config.dropout == 0.25
    assert apart(model.eval(), transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()) < 1e-5
    with pytest.raises(ValueError, match="may set dropout alone"):
        GPT.from_pretrained("gpt2", dict(n_layer=1))


@pytest.mark.slow
@pytest.mark.parametrize("what, words", [
    ("no config", ["config.json"]),
    ("no weights", ["model.safetensors"]),
    ("a .bin", ["transformers cannot read it as a gpt2 model"]),
    ("half", ["transformers cannot read it as a gpt2 model"]),
    ("config", ["JSON"]),
    ("family", ["bloom", "gpt2", "gpt_neo"]),
    ("a tensor less", ["h.1.mlp.c_fc.weight"]),
    ("a tensor more", ["h.0.adapter.weight"]),
    ("eps", ["layer_norm_epsilon=1e-06"]),
    ("activation", ["'silu'", "gelu_new"]),
    ("sizes", ["n_embd"]),
    ("vocabulary", ["256", "61"]),
    ("no heads", ["gpt2"]),
    ("quantised", ["quantis"]),
    ("NaN", ["h.1.mlp.c_fc.weight", "NaN"]),
    ("tokenizer", ["tokenizer"]),
    ("no tokens", ["tokenizer"]),
    ("unigram", ["tokenizer", "byte pairs"]),
])
def test_what_is_wrong_with_a_folder_is_one_line(what, words, gpt2_folder, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    weights = folder / "model.safetensors"
    tensors = safetensors.load_file(weights)
    if what == "no config":
        (folder / "config.json").unlink()
    elif what in ("no weights", "a .bin"):
        weights.unlink()
        if what == "a .bin":
            (folder / "pytorch_model.bin").write_bytes(b"x")
    elif what == "half":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif what == "config":
        (folder / "config.json").write_text("{")
        weights.rename(folder / "model.safetensors")
    elif what == "family":
        edit(folder, model_type="bloom")
    elif what == "a tensor less":
        del tensors["transformer.h.1.mlp.c_fc.weight"]
        safetensors.save_file(tensors, weights)
    elif what == "a tensor more":
        safetensors.save_file({**tensors, "transformer.h.0.adapter.weight": torch.ones(2)}, weights)
    elif what == "eps":
        edit(folder, layer_norm_epsilon=1e-6)
    elif what == "activation":
        edit(folder, activation_function="silu")
    elif what == "sizes":
        edit(folder, n_embd="many")
    elif what == "vocabulary":
        vocab = {symbol: i for i, symbol in enumerate(byte_symbols())}
        (folder / "vocab.json").write_text(json.dumps(vocab))
    elif what == "no heads":
        edit(folder, n_head=0)
    elif what == "quantised":
        edit(folder, quantization_config=dict(quant_method="bitsandbytes", load_in_8bit=True))
    elif what == "NaN":
        tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = float("nan")
        safetensors.save_file(tensors, weights)
    elif what == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    elif what in ("no tokens", "unigram"):
        vocab = {} if what == "no tokens" else [["the", -1.0], ["a", -2.0]]
        (folder / "tokenizer.json").write_text(json.dumps(dict(model=dict(vocab=vocab))))
    refused(folder, *words)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_may_not_be_read_says_so(name, gpt2_folder, unreadable, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    (folder / "tokenizer.json").write_text("{}")
    folder = unreadable(folder, name)
    refused(folder, f"{folder / name} cannot be read: Permission denied")


@pytest.mark.slow
@pytest.mark.parametrize("name, fields, words", [
    ("llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)), ["'yarn'", "llama3"]),
    ("llama", dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4)), ["low_freq_factor"]),
    ("llama", dict(attention_bias=True), ["attention_bias=True"]),
    ("llama", dict(hidden_act="gelu"), ["hidden_act='gelu'"]),
    ("llama", dict(num_key_value_heads=4), ["n_kv_head=4", "n_head=6"]),
    ("mistral", dict(sliding_window=16), ["sliding_window=16"]),
    ("qwen2", dict(use_sliding_window=True), ["use_sliding_window=True"])], ids=str)
def test_what_a_llama_has_that_ours_has_not_is_one_line(name, fields, words, tmp_path):
    family, its = ORIGINALS[name]
    if "rope_parameters" in fields:  # which transformers refuses itself, in part
        original(family, its).save_pretrained(tmp_path)
        edit(tmp_path, **fields)
    else:
        original(family, {**its, **fields}).save_pretrained(tmp_path)
    with pytest.raises(UserError) as e:
        ours(tmp_path)
    assert "\n" not in str(e.value) and all(word in str(e.value) for word in words), str(e.value)


def test_sizes_that_disagree_with_the_weights_are_refused(gpt2_folder, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    edit(folder, n_positions=16)
    with pytest.raises(UserError, match="another size of the tensor transformer.wpe.weight"):
        ours(folder)


def test_names_of_the_hub_and_a_hub_out_of_reach(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("gpt2", "distilgpt2", "gpt2-xl", "EleutherAI/gpt-neo-125m", "HuggingFaceTB/SmolLM2-135M",
                 "somebody-new/a_Llama.v2"):
        assert hf.is_name(name)
        refused(name, f"no checkpoint {name}", "give that folder")
    for path in ("nowhere", "out/a", "out-a/b", "runs/a", "gpt2.pt", "gpt2/ckpt.pt", "a/b/c", "./a", "/a/b"):
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
                "--adamw_lr=1e-12",
                "--min_lr=0", "--warmup_iters=0"])
    model = ours(tmp_path / "run")
    assert model.config.acag == "headwise" and model.config.window_layers == [1, 3]
    assert apart(model, there) < 1e-4  # a step of no length away
    with pytest.raises(SystemExit, match="no neutral setting"):
        train.main([*args, f"--out_dir={tmp_path / 'other'}", "--key_offset=True"])


@pytest.mark.parametrize("meta, words", [
    (dict(encoding="char", vocab=list("aab")), "different single characters"),
    (dict(encoding="hf", vocab="{}"), "only tokenizers of byte pairs"),
    (dict(encoding="byte", vocab_size=300), "vocab_size=300 must be 256")])
def test_a_damaged_vocabulary_is_not_written(tmp_path, meta, words):
    with pytest.raises(ValueError, match=words):
        hf.export(tiny(**SIZES).float(), dict(name="x", **meta), tmp_path / "x")
    model = tiny(**SIZES).float()
    checkpoint.save(tmp_path / "x.pt", dict(model=model.state_dict(), config=model.config.flags(),
                                            meta=dict(name="x", **dict(vocab_size=58) | meta)))
    with pytest.raises(SystemExit, match="x.pt: its vocabulary cannot be read: .*" + words):
        main(["--ckpt", str(tmp_path / "x.pt"), "--out", str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()


def test_another_vocabulary_than_the_datasets_is_refused(tmp_path, bytes_data):
    model = tiny(**SIZES).float()
    vocab = [chr(65 + i) for i in range(58)]
    hf.export(model, dict(name="x", encoding="char", vocab_size=58, vocab=vocab), tmp_path / "x")
    state = checkpoint.read(tmp_path / "x")
    with pytest.raises(UserError, match="whose vocabulary is not that of sums"):
        checkpoint.check_vocabulary(state, Dataset(bytes_data), "x")


# ---- out ----

WRITTEN = {"gpt2": dict(recipe="gpt2"),
           "gpt2, all biases": dict(recipe="gpt2", bias=True, act="gelu_tanh", tied=False, n_inner=48),
           "modern": dict(recipe="modern"),
           "modern, other heads": dict(recipe="modern", head_dim=6),
           "modern, capped": dict(recipe="modern", softcap=15.0, tied=True, rope_base=500.0),
           "llama": dict(recipe="llama", n_kv_head=2, norm_eps=1e-3),
           "llama, stretched": dict(recipe="llama", rope_scaling=[4.0, 1.0, 3.0, 16.0], tied=True,
                                    head_dim=6),
           "qwen2": dict(recipe="llama", qkv_bias=True, n_kv_head=1),
           "qwen3": dict(recipe="llama", qk_norm=True, qk_scale=True),
           "qk_max": dict(recipe="modern", qk_max=12.0),
           "parallel": dict(recipe="gpt2", pos="rope", rope_share=0.25, parallel=True),
           "all on": dict(recipe="modern", **ALL_ON, n_embd=64)}
CLASSES = {"gpt2": "GPT2LMHeadModel", "gpt2, all biases": "GPT2LMHeadModel", "modern": "NanoChatForCausalLM",
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
    want = model.generate(prompt, 12, temperature=0)
    for use_cache in (True, False):
        got = there.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=use_cache, pad_token_id=0)
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WRITTEN, *MECHANISMS])
def test_transformers_says_what_we_say(name, tmp_path):
    flags = WRITTEN.get(name) or dict(MECHANISMS[name], recipe="modern")
    model = tiny(**{**SIZES, **flags}).float()
    said, there = written(model, tmp_path / "out")
    assert type(there).__name__ == CLASSES.get(name, "NanoHeadsForCausalLM")
    same_everywhere(model, there)
    if said[0] != "nanochat":  # which is written alone
        assert apart(ours(tmp_path / "out"), model) < 1e-6  # and read back


OLD, NEW = ("rope_theta", "rope_scaling"), ("rope_parameters",)  # of transformers 4 and 5, in config.json


@pytest.mark.parametrize("name", ["llama", "llama, stretched", "qwen2", "qwen3"])
def test_versions_4_and_5_of_transformers_read_the_same_positions(name, tmp_path):
    """A folder holds what each of them reads, and either form alone is read here as well."""
    model = tiny(**{**SIZES, **WRITTEN[name]}, rope_base=50).float()
    hf.export(model, None, tmp_path / "both")
    config = hf.config_of(tmp_path / "both")
    assert {**config["rope_parameters"]} == {
        **(config["rope_scaling"] or dict(rope_type="default")), "rope_theta": config["rope_theta"]}
    assert config["rope_theta"] == 50.0 and isinstance(config["rope_theta"], float)  # as version 4 wants them
    for key, value in (config["rope_scaling"] or {}).items():
        assert key == "rope_type" or type(value) is (int if key.startswith("original") else float)
    for gone in (OLD, NEW):
        folder = shutil.copytree(tmp_path / "both", tmp_path / gone[0])
        left = {key: value for key, value in config.items() if key not in gone}
        (folder / "config.json").write_text(json.dumps(left))
        there = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert apart(there, model) < 1e-5 and apart(ours(folder), model) < 1e-6


def test_the_code_of_a_folder_names_every_file_for_version_4(tmp_path):
    """It copies what the first file imports, and nothing that those files import."""
    hf.export(GPT(GPTConfig(**SIZES, **MECHANISMS["acag"])), None, tmp_path / "out")
    named = re.findall(r"^from \.(\w+) import", (tmp_path / "out/modeling_nanoheads.py").read_text(), re.M)
    assert {*named, "modeling_nanoheads"} == {path.stem for path in (tmp_path / "out").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("name", ["agency", "key_offset", "roles", "window_global_random"])
def test_tables_that_no_file_holds_are_made_anew(name, recipe, tmp_path, monkeypatch):
    """Whatever lies in the memory in which transformers builds a model."""
    model = tiny(**{**SIZES, **MECHANISMS[name]}, recipe=recipe).float()
    empty = torch.empty_like
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
    assert hf.read(str(tmp_path / "own"))["config"] == hf.read(tmp_path / "own")["config"]  # as typed
    pruning.prune_heads(model, {0: [1, 2], 2: [0, 1, 2, 3]})
    said, there = written(model, tmp_path / "pruned")
    assert said == ("nanoheads", "heads were pruned")
    same_everywhere(model, there)
    assert sum(p.numel() for p in there.parameters()) == model.num_params()
    with pytest.raises(UserError, match="this model is no gpt2: heads were pruned"):
        hf.export(model, None, tmp_path / "no", family="gpt2")
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_late_skips_are_written_once_they_have_risen(tmp_path):
    model = tiny(**SIZES, unet="concat", unet_from=5, unet_ramp=4).float()
    model.at_step(6)
    with pytest.raises(UserError, match="train beyond step 9"):
        hf.export(model, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model.at_step(100)
    _, there = written(model, tmp_path / "out")
    assert apart(there, model) < 1e-6 and apart(ours(tmp_path / "out"), model) < 1e-6


@pytest.mark.slow
def test_as_a_model_of_transformers(tmp_path):
    """Left padding, labels, beams, save_pretrained and back, another dtype: as everywhere there."""
    flags = dict(MECHANISMS["constraint_a"], **MECHANISMS["key_offset"], acag="headwise", recipe="modern")
    model = tiny(**SIZES, **flags).float()
    _, there = written(model, tmp_path / "out")
    row = IDS[:1, :7]
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), row), 1)
    mask = (torch.arange(11) >= 4).long()[None]
    with torch.no_grad():
        assert torch.allclose(there(padded, attention_mask=mask).logits[:, 4:], model(row).logits, atol=1e-5)
        right = there(padded.flip(1), attention_mask=mask.flip(1)).logits[:, :7]
        assert torch.allclose(right, model(row.flip(1)).logits, atol=1e-5)
        out = there(IDS, labels=IDS)
        shifted = model(IDS[:, :-1], IDS[:, 1:])
        assert torch.allclose(out.loss, shifted.loss, atol=1e-5)
        # Trainer divides by what a whole batch scores, and believes a forward pass that takes **kwargs
        parts = [there(ids, labels=ids, num_items_in_batch=torch.tensor(62)).loss for ids in IDS.split(1)]
        assert torch.allclose(sum(parts), shifted.loss, atol=1e-5)
        assert there(IDS, logits_to_keep=1).logits.shape == (2, 1, 61)
    both = torch.cat((padded, IDS[1:, :11]))
    masks = torch.cat((mask, torch.ones(1, 11, dtype=torch.long)))
    got = there.generate(both, attention_mask=masks, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(got[:1, 4:], model.generate(row, 8, temperature=0))
    beams = [there.generate(row, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=cached,
                            pad_token_id=0) for cached in (True, False)]
    assert torch.equal(*beams)
    with pytest.raises(ValueError, match="pad left to generate"):
        there.generate(padded.flip(1), attention_mask=mask.flip(1), max_new_tokens=2, pad_token_id=0)
    places = torch.arange(IDS.size(1))
    assert torch.equal(there(IDS, position_ids=places[None]).logits, there(IDS).logits)
    with pytest.raises(ValueError, match="no packed documents"):
        there(IDS, position_ids=places[None] % 5, attention_mask=torch.ones_like(IDS))
    with pytest.raises(ValueError, match="the cache is a DynamicCache"):
        there(IDS, past_key_values=transformers.DynamicCache())
    there.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert apart(again.eval(), model) < 1e-5
    again.resize_token_embeddings(64)
    again.save_pretrained(tmp_path / "more tokens")
    more = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "more tokens", trust_remote_code=True)
    assert torch.equal(more.eval()(IDS).logits, again(IDS).logits) and more(IDS).logits.size(-1) == 64
    assert apart(ours(tmp_path / "more tokens"), more) < 1e-5
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True,
                                                             dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and apart(half.eval(), model) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_have_the_logits_of_each_alone(side, tmp_path):
    """As other programs score texts of several lengths; without the mask, padding on the left is seen."""
    model = tiny(**SIZES, **MECHANISMS["constraint_a"], acag="headwise").float()
    _, there = written(model, tmp_path / "out")
    lengths, rows = (32, 19, 7), torch.zeros(3, 32, dtype=torch.long)
    mask = torch.zeros_like(rows)
    for i, n in enumerate(lengths):
        place = slice(32 - n, 32) if side == "left" else slice(n)
        rows[i, place], mask[i, place] = IDS[0, :n], 1
    with torch.no_grad():
        logits, blind = there(rows, attention_mask=mask).logits, there(rows).logits
        for i, n in enumerate(lengths):
            want = model(IDS[:1, :n]).logits[0]
            assert torch.allclose(logits[i, mask[i] == 1], want, atol=1e-5)
            seen = not torch.allclose(blind[i, mask[i] == 1], want, atol=1e-2)
            assert seen == (side == "left" and n < 32)


def test_a_mask_with_a_hole_is_refused_and_a_boolean_one_is_read(tmp_path):
    model = tiny(**SIZES, **MECHANISMS["acag"]).float()
    _, there = written(model, tmp_path / "out")
    ids = IDS[:1, :5]
    for mask in ([1, 1, 0, 1, 1], [1, 0, 0, 1, 1], [0, 1, 0, 1, 1]):
        with pytest.raises(ValueError, match="zeros inside a row's text"):
            there(ids, attention_mask=torch.tensor([mask]))
    for mask in ([1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 1, 0]):
        mask = torch.tensor([mask])
        with torch.no_grad():
            some, same = (there(ids, attention_mask=each).logits for each in (mask, mask.bool()))
            want = model(ids[:, mask[0] == 1]).logits
        assert torch.equal(some, same) and torch.allclose(some[:, mask[0] == 1], want, atol=1e-5)


@pytest.mark.parametrize("line, stands", [
    ("import model", True), ("import model as m", True), ("from nanoheads import kernels", True),
    ("from nanoheads.common import UserError", False), ("import nanoheads.kernels", False)])
def test_every_import_of_an_own_mechanism_leads_into_its_folder(line, stands, mine, tmp_path):
    """Else the folder has no such module, or finds another class of the same name where the repository is."""
    model_py = sys.modules["model"]
    own_mechanism.add(mine("import torch\n", f"import torch\n{line}\n"))
    model = tiny(**SIZES, forget=True).float()
    if not stands:
        with pytest.raises(UserError, match="cannot hold its import of nanoheads"):
            hf.export(model, None, tmp_path / "out")
        return
    hf.export(model, None, tmp_path / "out")
    code = (tmp_path / "out/own_mechanism_0.py").read_text()
    assert "from . import" in code and not hf.imports_of_ours(code) and model_py is sys.modules["model"]


@pytest.mark.slow
def test_the_folder_needs_nothing_of_this_repository(tmp_path):
    model = tiny(**SIZES, **MECHANISMS["acag"]).float()
    hf.export(model, None, tmp_path / "out")
    code = ("import sys, torch, transformers\n"
            "there = transformers.AutoModelForCausalLM.from_pretrained('out', trust_remote_code=True)\n"
            f"assert not any(str(p).startswith({str(ROOT)!r}) and 'site-packages' not in str(p)\n"
            "               for p in (sys.modules[type(there).__module__].__file__,))\n"
            "print(there(torch.arange(1, 9)[None]).logits.sum().item())\n")
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-2000:]
    want = model(torch.arange(1, 9)[None]).logits.sum().item()
    assert float(said.stdout) == pytest.approx(want, abs=1e-3)


TEXT = "Hello  world,\n\n it's naïve — 12345 ok \U0001f600\t\n  end "


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["byte", "char", "gpt2", "hf"])
def test_tokenizers_come_along(encoding, tmp_path, request, monkeypatch):
    monkeypatch.setattr(hf, "HOME", tmp_path)
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    pairs = json.dumps(hf.own_tokenizer(dict(encoding="byte")) | {
        "added_tokens": [dict(id=257, content="<|endoftext|>", single_word=False, lstrip=False, rstrip=False,
                              normalized=False, special=True)]})
    pairs = json.loads(pairs)
    pairs["model"]["vocab"]["He"], pairs["model"]["merges"] = 256, [["H", "e"]]
    vocab = {"char": sorted(set(TEXT)), "hf": json.dumps(pairs)}.get(encoding)
    tok = Tokenizer(encoding, vocab)
    want = tok.encode(TEXT)
    meta = dict(name="x", encoding=encoding, **({"vocab": vocab} if vocab else {}))
    hf.export(GPT(GPTConfig(**{**SIZES, "vocab_size": tok.vocab_size})), meta, tmp_path / "out")
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert there.encode(TEXT, add_special_tokens=False) == want.tolist()
    assert there.decode(want.tolist()) == tok.decode(want) == TEXT
    there.save_pretrained(tmp_path / "again")  # in whatever form
    shutil.copy(tmp_path / "out" / "config.json", tmp_path / "again")
    for folder in ("out", "again"):
        meta = hf.tokenizer_of(tmp_path / folder, dict(vocab_size=tok.vocab_size))
        assert meta["encoding"] == encoding
        assert Tokenizer.from_meta(meta).encode(TEXT).tolist() == want.tolist()


def published_tokenizer(kind):
    """The text of a tokenizer.json that puts <s> before a text; SentencePiece's kinds put a space, too."""
    text = byte_pairs("the river " * 9, special=("<s>", "</s>"))
    settings = json.loads(text) if kind == "bytes" else sentencepiece(kind)
    first = next(token["id"] for token in settings["added_tokens"] if token["content"] == "<s>")
    template = [dict(SpecialToken=dict(id="<s>", type_id=0)), dict(Sequence=dict(id="A", type_id=0))]
    return json.dumps(dict(settings, post_processor=dict(
        type="TemplateProcessing", single=template, pair=template,
        special_tokens={"<s>": dict(id="<s>", ids=[first], tokens=["<s>"])})))


@pytest.mark.parametrize("kind", ["bytes", "normalizer", "pre_tokenizer"])
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
    want = model.generate(prompt, 20, temperature=0, stop_token=tok.end)[0, 2:].tolist()
    assert said == want
    assert there.generation_config.eos_token_id == there.config.eos_token_id == ids.eos_token_id == tok.end
    assert hf.end_of_text(Tokenizer("byte")) == (None, None)  # a newline


@pytest.mark.parametrize("kind", ["bytes", "normalizer", "pre_tokenizer"])
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
    lines = capsys.readouterr().err.splitlines()
    assert lines.count(f"{folder}: before the text stands <s>, as its tokenizer puts it") == 3
    hf.export(model, hf.read(folder)["meta"], tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_text() == vocab


def test_a_tokenizer_is_the_same_in_another_layout():
    """Another order of keys, and what a program writes that reads it; other merges make another one."""
    vocab = published_tokenizer("normalizer")
    settings = json.loads(vocab)
    turned = json.dumps(dict(reversed(settings.items())), indent=3)
    again = tokenizers.Tokenizer.from_str(vocab).to_str(pretty=True)
    old = dict(meta=dict(name="x", encoding="hf", vocab=vocab, vocab_size=0), config=dict(vocab_size=999))
    for text in (turned, again):
        new = SimpleNamespace(vocab_size=0, meta=dict(old["meta"], vocab=text))
        assert text != vocab and checkpoint.check_vocabulary(old, new, "x") is None
    settings["model"]["merges"].reverse()
    for text in (json.dumps(settings), "damaged"):
        new.meta["vocab"] = text
        with pytest.raises(UserError, match="whose vocabulary is not that of x"):
            checkpoint.check_vocabulary(old, new, "x")


@pytest.mark.slow
def test_gpt2_files_are_kept_out_of_any_folder_that_has_them(tmp_path, monkeypatch, gpt2_files):
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
def test_the_program_and_its_refusals(tmp_path, bytes_data, refusal, capsys):
    train.main([*(f"--{key}={value}" for key, value in TINY.items()), f"--dataset={bytes_data}",
                f"--out_dir={tmp_path / 'run'}", "--sentinel=sigmoid"])
    capsys.readouterr()
    out = str(tmp_path / "hf")
    main(["--ckpt", str(tmp_path / "run"), "--out", out])
    said = capsys.readouterr().out
    assert "nanoheads (sentinel is on)" in said and "tokenizer byte" in said
    assert "trust_remote_code=True" in said
    assert apart(ours(out), ours(tmp_path / "run"), IDS[:, :16]) < 1e-6
    assert "is there already" in refusal(["--ckpt", str(tmp_path / "run"), "--out", out])
    assert "this model is no nanochat: sentinel is on" in refusal(
        ["--ckpt", str(tmp_path / "run"), "--out", out, "--force", "--as", "nanochat"])
    main(["--ckpt", str(tmp_path / "run"), "--out", out, "--force"])
    capsys.readouterr()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]  # nothing half-written lies about
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert "is no folder of a model" in refusal(
        ["--ckpt", str(tmp_path / "run"), "--out", str(tmp_path / "mine"), "--force"])
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_force_replaces_no_run_and_loses_nothing_on_the_way(tmp_path, monkeypatch):
    model, run, out = tiny(**SIZES).float(), tmp_path / "run", tmp_path / "hf"
    run.mkdir()
    (run / "config.json").write_text('{"train": {}}')
    (run / "best.pt").write_bytes(b"hours of work")
    with pytest.raises(UserError, match="is no folder of a model"):
        hf.export(model, None, run, force=True)
    assert (run / "best.pt").read_bytes() == b"hours of work"

    hf.export(model, None, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    def full(*args, **options):
        raise importlib.import_module("safetensors").SafetensorError("No space left on device")

    rename = type(out).rename
    for place, stop in ((safetensors, ("save_file", full)), (hf, ("write_json", interrupted)),
                        (type(out), ("rename", lambda path, to: interrupted() if to == out and
                                     path.name.endswith(".tmp") else rename(path, to)))):
        with monkeypatch.context() as m, pytest.raises((UserError, KeyboardInterrupt)) as e:
            m.setattr(place, *stop)
            hf.export(model, None, out, force=True)
        assert stop[1] is not full or "No space left" in str(e.value)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


PAGE = (ROOT / "docs" / "hugging-face.md").read_text(encoding="utf-8")
FEW = dict(max_iters=1, eval_interval=1, eval_tokens=64, batch_size=2, lr_decay_iters=9, warmup_iters=0,
           unet_from=0, unet_ramp=0, device="cpu")  # what the page's training commands get, beside their own


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with what the page's commands name: small models and texts under those names."""
    desk = tmp_path_factory.mktemp("desk")
    pairs = hf.own_tokenizer(dict(encoding="byte"))
    pairs["model"]["vocab"]["th"], pairs["model"]["merges"] = 256, [["t", "h"]]
    own, another = dict(encoding="byte"), dict(encoding="hf", vocab=json.dumps(pairs))
    for name, family, fields, tokenizer in (
            ("gpt2", "GPT2", dict(GPT2, vocab_size=256), own),
            ("distilgpt2", "GPT2", dict(GPT2, vocab_size=256, n_layer=2), own),
            ("EleutherAI/gpt-neo-125m", "GPTNeo", dict(NEO, vocab_size=256, max_position_embeddings=256),
             own),
            ("HuggingFaceTB/SmolLM2-135M", "Llama", dict(LLAMA, vocab_size=300), another)):
        original(family, fields).save_pretrained(desk / name)
        for file, text in hf.tokenizer_files(tokenizer, 32).items():
            (desk / name / file).write_text(text)
    shutil.copytree(desk / "HuggingFaceTB/SmolLM2-135M", desk / "SmolLM2-135M")  # what `hf download` writes
    text = b"The head that says what the other says is no other head.\n" * 80
    write_dataset(desk / "shakespeare", dict(train=text, val=text[:900], test=text[:900]))
    (desk / "my.txt").write_bytes(text)
    words = b"some river or a stone or one horse and the house with rivers and stones and horses and houses "
    wiki = b"".join(b" = Title %d = \n \n %s\n" % (i, words * 5) for i in range(20))
    for name in ("wikitext2", "wikitext2_byte", "pystdlib"):
        write_dataset(desk / name, dict(train=wiki, val=wiki[:900], test=wiki))
    for name, text, flag in (("a", "shakespeare", "--sentinel=sigmoid"),
                             ("plain", "shakespeare", "--recipe=gpt2"),
                             ("tiny", "wikitext2_byte", "--recipe=modern")):  # the README's first run
        train.main([*(f"--{key}={value}" for key, value in TINY.items()), f"--dataset={desk / text}",
                    f"--out_dir={desk / 'out' / name}", flag, "--block_size=64", "--n_layer=2"])
    main([f"--ckpt={desk / 'out' / 'a'}", f"--out={desk / 'exported' / 'a'}"])  # the README's, too
    return desk


@pytest.mark.slow
@pytest.mark.parametrize("language", ["sh", "python"])
def test_every_command_of_the_page_runs(language, desk, monkeypatch, capsys):
    """In the order of the page, the Python parts after the commands whose files they read."""
    monkeypatch.chdir(desk)
    ran, read = 0, configurator.parse_command
    for block in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL):
        if language == "python":
            exec(compile(block, "docs/hugging-face.md", "exec"), {})
            ran += 1
            continue
        for line in block.replace("\\\n", " ").strip().split("\n"):
            python, script, *args = shlex.split(line, comments=True)
            if python != "python":  # lm_eval, which is no program of this repository
                continue
            if script == "-m":
                script, *args = args
            module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
            if script == "train.py":
                monkeypatch.setattr(configurator, "parse_command",
                                    lambda classes, argv: read(classes, argv, {"the test": FEW}))
            module.main(args)
            ran += 1
    assert ran >= (7 if language == "sh" else 1)


def test_a_dataset_in_another_models_byte_pairs(tmp_path):
    text = json.dumps(hf.own_tokenizer(dict(encoding="byte")))
    folder = write_dataset(tmp_path / "pairs", {s: TEXT * 9 for s in ("train", "val", "test")}, "hf", text)
    data = Dataset(folder)
    assert data.vocab_size == 256 and data.tokenizer.decode(data.tokens("val")) == TEXT * 9
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "my.txt").write_text(TEXT * 30)
    args = [f"--source={tmp_path / 'my.txt'}", "--encoding=hf", f"--out={tmp_path / 'mine'}"]
    prepare_text([*args, f"--tokenizer={tmp_path}"])
    assert Dataset(tmp_path / "mine").meta["encoding"] == "hf"
    with pytest.raises(UserError, match="go together"):
        prepare_text(args)
    with pytest.raises(UserError, match="no tokenizer.json|No such file"):
        prepare_text([*args, f"--tokenizer={tmp_path / 'pairs'}"])
    with pytest.raises(ValueError, match="only tokenizers of byte pairs"):
        Tokenizer("hf", json.dumps(hf.own_tokenizer(dict(encoding="char", vocab=["a"]))))


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


def sentencepiece(prepends, **changed):
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
    about.update(changed)
    return about


@pytest.mark.parametrize("prepends", ["normalizer", "pre_tokenizer"])
def test_tokens_of_sentencepiece_spell_the_texts_bytes(prepends, tmp_path):
    """Those of the tokenizer itself, but for the space that it puts before a text; unknown characters too."""
    about = sentencepiece(prepends)
    text = f"{TEXT} naïve — 日本語 😀\r\n\x00\t  two spaces, <s> </s> as text, <0x41>"
    ours = Tokenizer("hf", json.dumps(about))
    ids = ours.encode(text)
    assert ours.decode_bytes(ids) == text.encode() and ours.vocab_size > 300
    assert b"".join(ours.decode_bytes([i]) for i in ids) == text.encode()
    theirs = tokenizers.Tokenizer.from_str(json.dumps(about))
    theirs.encode_special_tokens = True
    with_space = theirs.encode("x" + text, add_special_tokens=False).ids
    assert ours.decode_bytes(with_space) == b" x" + text.encode()
    assert ours.encode(" x" + text).tolist() == with_space, "a text that begins with a space: the same tokens"
    assert theirs.decode(with_space) == "x" + text
    with pytest.raises(ValueError, match="which this vocabulary writes for a space"):
        ours.encode("a\u2581b")
    del about["model"]["vocab"]["<0x41>"]
    with pytest.raises(ValueError, match="has the byte 0x41, for which"):
        Tokenizer("hf", json.dumps(about)).encode("A")
    folder = write_dataset(tmp_path / "pairs", {s: TEXT * 9 for s in ("train", "val", "test")}, "hf",
                           json.dumps(sentencepiece(prepends)))
    assert Dataset(folder).tokenizer.decode(Dataset(folder).tokens("val")) == TEXT * 9


# ---- nonsense in a folder ----

@pytest.mark.slow
@pytest.mark.parametrize("size", ["256", [256], {"a": 1}, None, -1, 0, 1.5, True, 10**400, [[]]])
@pytest.mark.parametrize("tokenizer", [False, True])
def test_a_vocab_size_that_is_no_number_is_one_line(size, tokenizer, gpt2_folder, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    edit(folder, vocab_size=size)
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(dict(model=dict(vocab=dict(a=0, b=1), merges=[]))))
    with pytest.raises(UserError) as e:
        checkpoint.build(checkpoint.read(folder), folder)
    assert "\n" not in str(e.value) and ("vocab_size" in str(e.value) or isinstance(size, int))


NO_JSON = ("{", "", "3", "null", "\0")
FILES = ("config.json", "tokenizer.json", "vocab.json")


# an empty tokenizer.json counts as none
@pytest.mark.slow
@pytest.mark.parametrize("name, text", [(name, text) for name in FILES for text in NO_JSON
                                        if text or name != "tokenizer.json"])
def test_a_file_that_holds_no_json_is_one_line(name, text, gpt2_folder, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    (folder / name).write_text(text)
    refused(folder, "tokenizer" if name != "config.json" else name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.json", "model.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_a_line_or_none(name, gpt2_folder, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    try:
        checkpoint.read(folder)
    except UserError as e:
        assert "\n" not in str(e)
    else:
        assert name in ("tokenizer.json", "vocab.json")  # a folder of that name is no tokenizer file


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [dict(a="x"), dict(a=-1), dict(a=1e300), dict(a=None), dict(a=[0]), 3, {}])
def test_ids_that_are_no_numbers_are_a_damaged_tokenizer(vocab, gpt2_folder, tmp_path):
    folder = shutil.copytree(gpt2_folder, tmp_path / "gpt2")
    (folder / "tokenizer.json").write_text(json.dumps(dict(model=dict(vocab=vocab, merges=[]))))
    refused(folder, "tokenizer files", "damaged")

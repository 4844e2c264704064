"""
Hugging Face folders, in and out, without transformers: config.json, model.safetensors and tokenizer files.

In:   every program that takes a checkpoint takes such a folder, or the name of one on the hub:
          python train.py config/tiny.py --init_from=gpt2 ...      python sample.py --ckpt DIR
      gpt2, gpt_neo, gpt_neox (Pythia), nanochat, and what this file wrote. The logits are the original's.
Out:  export_hf.py. A model that GPT2LMHeadModel or NanoChatForCausalLM can say becomes one; every other comes
      with this repository's model.py and loads with trust_remote_code=True.

Names of tensors and of config fields are those of transformers 5.23. docs/hugging-face.md is for users.
"""

import hashlib
import json
import math
import os
import re
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from model import MECHANISM_CLASSES, RECIPES
from nanoheads.common import ROOT, UserError, write_atomic, write_json
from nanoheads import own_mechanism as own
from nanoheads.text.sources import GPT2_ENCODER, GPT2_MERGES, HOME, keep
from nanoheads.text.tokenizer import byte_symbols

HUB = re.compile(r"(distil)?gpt2(-medium|-large|-xl)?|pythia-[\w.-]+"
                 r"|(EleutherAI|openai-community|distilbert|karpathy|HuggingFaceTB|meta-llama|Qwen"
                 r"|mistralai)/[\w.-]+")
FILES = ["config.json", "model.safetensors*", "*-of-*.safetensors", "vocab.json", "merges.txt",
         "tokenizer.json"]  # what is fetched from the hub
IGNORED = re.compile(r"(attn\.(attention\.)?(masked_)?bias|attention\.(masked_)?bias|rotary_emb\.inv_freq)$")
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
# sha256 of the lines "token id" of GPT-2's 50,257 tokens, in the order of ids
GPT2_VOCABULARY = "dfd729bcc6f1abaa6451126583f5a7eef7f2b2defe741084249792434e49d636"
# what a model needs that transformers lacks
CODE = ("nanoheads/hub/modeling_nanoheads.py", "model.py", "nanoheads/cpu.py", "nanoheads/kernels.py",
        "nanoheads/logits.py", "nanoheads/mechanism.py", "nanoheads/rivals.py")


# ---- in ----

def is_folder(path):
    """Is it a folder of a model in Hugging Face's form? A run's folder has a config.json too, another one."""
    path = Path(path)
    if any(path.glob("*.safetensors*")):
        return True
    return (path / "config.json").is_file() and "model_type" in config_of(path)


def config_of(folder):
    """The dict in config.json. UserError."""
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json: fetch it too") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} cannot be read as JSON ({type(e).__name__}): fetch it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no config, but a {type(found).__name__}")
    return found


def is_name(text):
    """Is it a name on the hub of a family that is known here? Every other text is a path."""
    return HUB.fullmatch(str(text)) is not None


def fetch(name):
    """The local folder of a model by its name on the hub, downloaded if need be. UserError without network.
    """
    advice = (f"no checkpoint {name}, and no model of that name could be fetched: put its config.json, "
              "model.safetensors, vocab.json and merges.txt into a folder and give that folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{advice} (a download takes: pip install huggingface_hub)") from None
    name, wanted = f"EleutherAI/{name}" if name.startswith("pythia-") else name, dict(allow_patterns=FILES)
    try:
        return snapshot_download(name, local_files_only=True, **wanted)
    except Exception:  # not in the cache: ask the hub
        pass
    try:
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise OSError("HF_HUB_OFFLINE is set")
        return snapshot_download(name, **wanted)
    except Exception as e:  # the hub's errors are many; each says the same to the reader
        raise UserError(f"{advice} ({type(e).__name__})") from None


def read(folder, trust_code=False):
    """A folder in the form of our checkpoints: dict(model, config, meta, dataset). UserError.

    trust_code: of a mechanism in a file of one's own, that in the folder is run; without, nothing is.
    """
    c = config_of(folder)
    if not isinstance(c.get("model_type"), str):
        raise UserError(f"{Path(folder) / 'config.json'} names no model_type: it is not this model's")
    if c["model_type"] not in FAMILIES:
        raise UserError(f"{folder} holds a {c['model_type']} model; known are {', '.join(FAMILIES)}")
    tensors = Tensors(folder)
    check_layers(folder, c, tensors)
    try:
        config, weights = FAMILIES[c["model_type"]](c, tensors)
        size = config.get("vocab_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"vocab_size={str(size)[:40]} is no number of tokens")
    except UserError as e:
        raise UserError(str(e) if str(folder) in str(e) else f"{folder}: {e}") from None
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError, IndexError) as e:
        raise UserError(f"{folder}: its config.json and its tensors do not make a {c['model_type']} model "
                        f"({type(e).__name__}: {' '.join(str(e).split())[:150]})") from None
    if tensors.left():
        raise UserError(f"{folder} holds tensors that a {c['model_type']} model here has no place for: "
                        f"{', '.join(tensors.left()[:3])}")
    state = dict(model=weights, config=config, meta=tokenizer_of(folder, config), dataset=None)
    if c.get("own_mechanism"):
        state["own_mechanism"] = c["own_mechanism"]
    if trust_code:
        own.trust(state, folder)
    return state


def check_layers(folder, c, tensors):
    """UserError where config.json says another number of layers than there are tensors of."""
    sizes = c["gpt"] if isinstance(c.get("gpt"), dict) else c
    numbered = re.compile(r"(?:^|\.)(?:h|layers)\.(\d+)\.")
    there = {found[1] for name in tensors.found if (found := numbered.search(name))}
    for key in ("n_layer", "num_layers", "num_hidden_layers"):
        if isinstance(sizes.get(key), int) and sizes[key] != len(there):
            raise UserError(f"{folder}: its config.json says {key}={sizes[key]}, and its tensors are of "
                            f"{len(there)} layers: a half download, or another model's config")


class Tensors:
    """The tensors of a folder, each taken once, as float32; names without the model's own prefix."""

    PREFIX = re.compile(r"^(transformer|gpt_neox|model)\.")

    def __init__(self, folder):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        self.folder, self.found = folder, {}
        for path in self.files(Path(folder)):
            try:
                self.found.update({self.PREFIX.sub("", name): t for name, t in load_file(path).items()})
            except (OSError, SafetensorError) as e:
                why = " ".join(str(e).split())[:80]
                raise UserError(f"{path} is cut short or damaged ({why}): fetch it again") from None

    @staticmethod
    def files(folder):
        """The files of weights, all there. UserError."""
        whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if whole.is_file():
            return [whole]
        if not index.is_file():
            there = [p.name for p in sorted(folder.glob("*.bin"))[:1]]
            instead = (f"; {there[0]} is not read: load it with transformers and save_pretrained it" if there
                       else "")
            raise UserError(f"{folder} holds no model.safetensors{instead}")
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if outside := [name for name in names if Path(name).name != name]:
                raise UserError(f"{index} names {outside[0]}, which is no file of {folder}")
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{index} is damaged: fetch it again") from None
        for name in names:
            if not (folder / name).is_file():
                raise UserError(f"{folder} lacks {name}, one of {len(names)} files of weights: fetch it")
        return [folder / name for name in names]

    def __contains__(self, name):
        return name in self.found

    def take(self, name, *others):
        """The first of these tensors that there is. UserError."""
        for each in (name, *others):
            if each in self.found:
                t = self.found.pop(each)
                if not t.is_floating_point():
                    raise UserError(f"{self.folder}: {each} is {str(t.dtype).removeprefix('torch.')}: "
                                    "quantised weights are not known here")
                if not t.isfinite().all():
                    raise UserError(f"{self.folder}: {each} holds NaN or infinities: fetch it again")
                return t.float()
        raise UserError(f"{self.folder} lacks the tensor {name}: a half download, or another model")

    def left(self):
        """The names that were not taken, tables that follow from the config aside."""
        return sorted(name for name in self.found if not IGNORED.search(name))


def known(c, folder_type, **must):
    """Raise UserError where a config says something that our GPT has no flag for: {key: the one value}."""
    for key, value in must.items():
        if c.get(key, value) != value:
            raise UserError(f"a {folder_type} model with {key}={c[key]!r} is not known here, only {value!r}")


def rope_of(c, **old):
    """What a config says of RoPE, in whichever of its forms. UserError where it is stretched."""
    rope = {**old, **(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    known(rope, c["model_type"], rope_type="default", type="default")
    return rope


def activation(name):
    if name not in ACTIVATIONS:
        raise UserError(f"the activation {name!r} is not known here; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def head_of(weights, t, tied, *names):
    """The output head: the tensor of one of these names, or the embedding, which a file may hold again."""
    own = t.take(*names) if not tied or any(name in t for name in names) else None
    return weights["transformer.wte.weight"] if tied else own


def plain(t, tied):
    """What stands around the blocks of a GPT-2: {our name: tensor}."""
    weights = {"transformer.wte.weight": t.take("wte.weight"), "transformer.wpe.weight": t.take("wpe.weight")}
    weights["lm_head.weight"] = head_of(weights, t, tied, "lm_head.weight")
    for part in ("weight", "bias"):
        weights[f"transformer.ln_f.{part}"] = t.take(f"ln_f.{part}")
    return weights


def read_gpt2(c, t):
    """GPT-2 and DistilGPT2: nanoGPT's names, with the matrices of Conv1D transposed."""
    known(c, "gpt2", layer_norm_epsilon=1e-5, add_cross_attention=False)
    config = dict(
        recipe="gpt2", bias=True, act=activation(c.get("activation_function", "gelu_new")),
        tied=c.get("tie_word_embeddings", True), vocab_size=c["vocab_size"], block_size=c["n_positions"],
        n_layer=c["n_layer"], n_head=c["n_head"], n_embd=c["n_embd"], n_inner=c.get("n_inner"))
    if gone := {int(i): heads for i, heads in (c.get("pruned_heads") or {}).items()}:
        config["head_ids"] = [[head for head in range(c["n_head"]) if head not in gone.get(i, ())]
                              for i in range(c["n_layer"])]
    weights, D = plain(t, config["tied"]), c["n_embd"] // c["n_head"]
    for i in range(config["n_layer"]):
        h = {}
        for part in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            w = t.take(f"h.{i}.{part}.weight")
            h[f"{part}.weight"] = w if w.dim() == 1 else w.T.contiguous()
            h[f"{part}.bias"] = t.take(f"h.{i}.{part}.bias")
        scale = 1.0 if c.get("scale_attn_weights", True) else math.sqrt(D)
        scale /= i + 1 if c.get("scale_attn_by_inverse_layer_idx") else 1
        for part in ("weight", "bias"):  # ours always divides by the root
            w = h[f"attn.c_attn.{part}"]
            w[:len(w) // 3] *= scale
        weights.update({f"transformer.h.{i}.{name}": w for name, w in h.items()})
    return config, weights


def read_gpt_neo(c, t):
    """GPT-Neo: every other block sees a window, and its logits are not divided by sqrt(D): folded into q."""
    known(c, "gpt_neo", layer_norm_epsilon=1e-5)
    kinds = c.get("attention_layers") or [kind for pattern, n in c["attention_types"] for kind in pattern * n]
    if len(kinds) != c["num_layers"] or set(kinds) - {"global", "local"}:
        raise UserError(f"attention layers {kinds} are not {c['num_layers']} of global and local")
    config = dict(
        recipe="gpt2", bias=True, act=activation(c.get("activation_function", "gelu_new")),
        tied=c.get("tie_word_embeddings", True), vocab_size=c["vocab_size"],
        block_size=c["max_position_embeddings"], n_layer=c["num_layers"], n_head=c["num_heads"],
        n_embd=c["hidden_size"], n_inner=c.get("intermediate_size"))
    local = [i for i, kind in enumerate(kinds) if kind == "local"]
    if local:
        config.update(window=c["window_size"], window_layers=local)
    weights, C = plain(t, config["tied"]), c["hidden_size"]
    for i in range(config["n_layer"]):
        h = {}
        for part in ("ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            for kind in ("weight", "bias"):
                h[f"{part}.{kind}"] = t.take(f"h.{i}.{part}.{kind}")
        q, k, v = (t.take(f"h.{i}.attn.attention.{part}_proj.weight") for part in "qkv")
        h["attn.c_attn.weight"] = torch.cat((q * math.sqrt(C // c["num_heads"]), k, v))
        h["attn.c_attn.bias"] = torch.zeros(3 * C)  # it has none
        for kind in ("weight", "bias"):
            h[f"attn.c_proj.{kind}"] = t.take(f"h.{i}.attn.attention.out_proj.{kind}")
        weights.update({f"transformer.h.{i}.{name}": w for name, w in h.items()})
    return config, weights


def read_gpt_neox(c, t):
    """GPT-NeoX and Pythia: RoPE on the first rotary_pct of each head's dimensions, parallel residual."""
    known(c, "gpt_neox", layer_norm_eps=1e-5)
    rope = rope_of(c, rope_theta=c.get("rotary_emb_base", 10000.0),
                   partial_rotary_factor=c.get("rotary_pct", 0.25))
    C, H = c["hidden_size"], c["num_attention_heads"]
    D = C // H
    turned = int(D * rope["partial_rotary_factor"])
    if turned % 2 or not turned:
        raise UserError(f"RoPE on {turned} of {D} dimensions is not known here: their number must be even")
    config = dict(
        recipe="gpt2", bias=True, act=activation(c.get("hidden_act", "gelu")), pos="rope",
        rope_base=rope["rope_theta"], rope_share=turned / D, parallel=c.get("use_parallel_residual", True),
        tied=c.get("tie_word_embeddings", False), vocab_size=c["vocab_size"],
        block_size=c["max_position_embeddings"], n_layer=c["num_hidden_layers"], n_head=H, n_embd=C,
        n_inner=c["intermediate_size"])
    n, half = turned // 2, D // 2
    # ours pairs i with i + D/2, of which the first n turn; theirs i with i + n, and the rest stands behind
    order = [*range(n), *range(turned, turned + half - n), *range(n, turned), *range(turned + half - n, D)]
    weights = {"transformer.wte.weight": t.take("embed_in.weight")}
    for kind in ("weight", "bias"):
        weights[f"transformer.ln_f.{kind}"] = t.take(f"final_layer_norm.{kind}")
    weights["lm_head.weight"] = head_of(weights, t, config["tied"], "embed_out.weight", "lm_head.weight")
    names = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "mlp.c_fc": "mlp.dense_h_to_4h",
             "mlp.c_proj": "mlp.dense_4h_to_h", "attn.c_proj": "attention.dense"}
    for i in range(config["n_layer"]):
        h = {}
        for kind in ("weight", "bias"):
            for ours, theirs in names.items():
                if kind == "bias" and ours.startswith("attn") and not c.get("attention_bias", True):
                    h[f"{ours}.bias"] = torch.zeros(C)
                else:
                    h[f"{ours}.{kind}"] = t.take(f"layers.{i}.{theirs}.{kind}")
            if kind == "bias" and not c.get("attention_bias", True):
                h["attn.c_attn.bias"] = torch.zeros(3 * C)
                continue
            qkv = t.take(f"layers.{i}.attention.query_key_value.{kind}")
            q, k, v = qkv.unflatten(0, (H, 3, D)).transpose(0, 1)  # [H, D, ...] each
            h[f"attn.c_attn.{kind}"] = torch.cat((q[:, order], k[:, order], v)).flatten(0, 1)
        weights.update({f"transformer.h.{i}.{name}": w for name, w in h.items()})
    return config, weights


def read_nanochat(c, t):
    """nanochat: the modern recipe, whose RoPE turns the other way."""
    known(c, "nanochat", rms_norm_eps=1e-6, attention_bias=False, hidden_act="relu2")
    rope = rope_of(c, rope_theta=10000.0)
    H, C = c["num_attention_heads"], c["hidden_size"]
    K = c.get("num_key_value_heads", H)
    known(c, "nanochat", head_dim=C // H)
    config = dict(
        RECIPES["modern"], recipe="modern", tied=c.get("tie_word_embeddings", False),
        rope_base=rope["rope_theta"], softcap=c.get("final_logit_softcapping") or 0.0,
        vocab_size=c["vocab_size"],
        block_size=c["max_position_embeddings"], n_layer=c["num_hidden_layers"], n_head=H, n_embd=C,
        n_inner=c["intermediate_size"], n_kv_head=None if K == H else K)
    weights = {"transformer.wte.weight": t.take("embed_tokens.weight")}
    weights["lm_head.weight"] = head_of(weights, t, config["tied"], "lm_head.weight")
    for i in range(config["n_layer"]):
        q, k, v = (t.take(f"layers.{i}.self_attn.{part}_proj.weight") for part in "qkv")
        name = f"transformer.h.{i}."
        weights[name + "attn.c_attn.weight"] = torch.cat((turned_back(q, H), turned_back(k, K), v))
        weights[name + "attn.c_proj.weight"] = t.take(f"layers.{i}.self_attn.o_proj.weight")
        weights[name + "mlp.c_fc.weight"] = t.take(f"layers.{i}.mlp.fc1.weight")
        weights[name + "mlp.c_proj.weight"] = t.take(f"layers.{i}.mlp.fc2.weight")
    return config, weights


def turned_back(w, n_head):
    """Rows [H * D, C] of queries or keys with the second half of each head's negated: RoPE the other way."""
    heads = w.unflatten(0, (n_head, 2, -1)).clone()
    heads[:, 1] *= -1
    return heads.flatten(0, 2)


def read_llama(c, t):
    """Llama, SmolLM2, Mistral without a window, Qwen2 (biases on q, k, v), Qwen3 (q and k normed)."""
    kind, H, C = c["model_type"], c["num_attention_heads"], c["hidden_size"]
    known(c, kind, hidden_act="silu", mlp_bias=False, attention_bias=False, use_sliding_window=False)
    if kind == "mistral":
        known(c, kind, sliding_window=None)
    K, qwen2, qwen3 = c.get("num_key_value_heads") or H, kind == "qwen2", kind == "qwen3"
    rope, scaling = stretched_rope(c)
    config = dict(
        RECIPES["llama"], recipe="llama", tied=c.get("tie_word_embeddings", False), rope_base=rope,
        rope_scaling=scaling, norm_eps=c.get("rms_norm_eps", 1e-6), qkv_bias=qwen2, qk_norm=qwen3,
        qk_scale=qwen3, vocab_size=c["vocab_size"], block_size=c["max_position_embeddings"],
        n_layer=c["num_hidden_layers"], n_head=H, n_kv_head=None if K == H else K, head_dim=c.get("head_dim"),
        n_embd=C, n_inner=c["intermediate_size"])
    weights = {"transformer.wte.weight": t.take("embed_tokens.weight"),
               "transformer.ln_f.weight": t.take("norm.weight")}
    weights["lm_head.weight"] = head_of(weights, t, config["tied"], "lm_head.weight")
    for i in range(config["n_layer"]):
        for ours, theirs in LLAMA_NAMES.items():
            if ours.startswith("attn.qk_scale") and not qwen3 or ours.endswith("bias") and not qwen2:
                continue
            parts = [t.take(f"layers.{i}.{each}") for each in theirs]
            weights[f"transformer.h.{i}.{ours}"] = torch.cat(parts)
    return config, weights


# our name in a block: theirs, one behind the other
LLAMA_NAMES = {
    "ln_1.weight": ["input_layernorm.weight"], "ln_2.weight": ["post_attention_layernorm.weight"],
    "attn.c_attn.weight": [f"self_attn.{part}_proj.weight" for part in "qkv"],
    "attn.c_attn.bias": [f"self_attn.{part}_proj.bias" for part in "qkv"],
    "attn.c_proj.weight": ["self_attn.o_proj.weight"],
    "attn.qk_scale.0": ["self_attn.q_norm.weight"], "attn.qk_scale.1": ["self_attn.k_norm.weight"],
    "mlp.c_fc.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.c_proj.weight": ["mlp.down_proj.weight"]}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def stretched_rope(c):
    """(base, scaling as GPTConfig has it or None) of a config's RoPE; UserError: stretched in another way."""
    rope = {"rope_theta": c.get("rope_theta", 10000.0), **(c.get("rope_scaling") or {}),
            **(c.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"RoPE stretched as {kind!r} is not known here: 'default' and 'llama3' are")
    if kind == "default":
        return rope["rope_theta"], None
    if missing := [key for key in LLAMA3 if key not in rope]:
        raise UserError(f"RoPE of kind 'llama3' lacks {', '.join(missing)} in config.json")
    return rope["rope_theta"], [float(rope[key]) for key in LLAMA3]


def read_nanoheads(c, t):
    """What export() wrote for models of our own."""
    weights = {name.removeprefix("gpt."): w for name, w in t.found.items()}
    t.found = {}
    if c["gpt"].get("tied"):
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return {**c["gpt"], "vocab_size": c.get("vocab_size") or c["gpt"].get("vocab_size")}, weights


FAMILIES = dict(gpt2=read_gpt2, gpt_neo=read_gpt_neo, gpt_neox=read_gpt_neox, nanochat=read_nanochat,
                nanoheads=read_nanoheads,
                **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), read_llama))


# ---- tokenizers in ----

def tokenizer_of(folder, config):
    """meta of a checkpoint, what Tokenizer.from_meta() takes; None where the folder has no tokenizer.

    GPT-2's vocabulary is ours; every other is kept whole, as the text of its tokenizer.json. UserError.
    """
    folder = Path(folder)
    whole, vocab = folder / "tokenizer.json", folder / "vocab.json"
    if not whole.is_file() and not vocab.is_file():
        return None
    try:
        text = whole.read_text(encoding="utf-8") if whole.is_file() else ""
        ids = vocabulary(json.loads(text)) if text else json.loads(vocab.read_text(encoding="utf-8"))
        if not all(isinstance(i, int) and i >= 0 for i in ids.values()):
            raise ValueError("an id is no number")
        digest, size = fingerprint(ids), max(ids.values()) + 1
    except UserError as e:
        raise UserError(f"{folder}: {e}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"the tokenizer files of {folder} are damaged ({type(e).__name__}): fetch them again"
                        ) from None
    meta = dict(name=folder.name, vocab_size=size)
    if digest == GPT2_VOCABULARY:
        meta.update(encoding="gpt2")
        keep_gpt2(folder, ids, text)
    elif ours := own_encoding(ids):
        meta.update(ours)
    elif not text:
        raise UserError(f"{folder} has a vocabulary that is not GPT-2's, and no tokenizer.json to read it by")
    else:
        meta.update(encoding="hf", vocab=text)
    if meta["vocab_size"] > config["vocab_size"]:
        raise UserError(f"{folder}: its tokenizer has {meta['vocab_size']:,} tokens, its model knows "
                        f"{config['vocab_size']:,}")
    return meta


def keep_gpt2(folder, ids, text):
    """Keep GPT-2's two files in data/gpt2_bpe, out of a folder that has them in whatever form."""
    merges = folder / "merges.txt"
    pairs = merges.read_text(encoding="utf-8") if merges.is_file() else ""
    if not pairs:
        lines = (each if isinstance(each, str) else " ".join(each)
                 for each in json.loads(text)["model"]["merges"])
        pairs = "\n".join(("#version: 0.2", *lines)) + "\n"
    ordered = dict(sorted(ids.items(), key=lambda item: item[1]))
    for file, content in ((GPT2_ENCODER, json.dumps(ordered)), (GPT2_MERGES, pairs)):
        path, content = HOME / file.names[0], content.encode()
        if not path.is_file() and hashlib.sha256(content).hexdigest() == file.sha256:
            with suppress(OSError):  # a read-only checkout: they are looked for elsewhere
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, lambda f: f.write(content))


def vocabulary(tokenizer):
    """{token: id} of the dict in a tokenizer.json, added tokens too. UserError."""
    if isinstance(tokenizer["model"].get("vocab"), list):  # Unigram's
        raise UserError("only tokenizers of byte pairs are known here, not Unigram's")
    return {**tokenizer["model"]["vocab"],
            **{each["content"]: each["id"] for each in tokenizer.get("added_tokens", ())}}


def fingerprint(ids):
    """sha256 of a vocabulary {token: id}."""
    lines = "".join(f"{token} {i}\n" for token, i in sorted(ids.items(), key=lambda item: item[1]))
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()


def own_encoding(ids):
    """What from_meta() takes where a vocabulary is one that tokenizer_files() writes for bytes or characters.
    """
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    if sorted(ids.values()) != [*range(len(ids))]:
        return None
    if tokens == byte_symbols():
        return dict(encoding="byte")
    return dict(encoding="char", vocab=tokens) if all(len(token) == 1 for token in tokens) else None


# ---- out ----

def what_it_is(config):
    """(family, why not a plainer one): one of OTHERS, or nanoheads, which needs this repository's code."""
    on = [cls.flag for cls in MECHANISM_CLASSES if cls.is_on(config)]
    if on:
        return "nanoheads", f"{', '.join(on)} {'is' if len(on) == 1 else 'are'} on"
    if config.head_ids is not None:
        return "nanoheads", "heads were pruned"
    for family, flags in OTHERS.items():
        differ = [f"{key}={getattr(config, key)!r}" for key, values in flags.items()
                  if getattr(config, key) not in values]
        if not differ:
            return family, ""
        if family == dict(gpt2="gpt2", modern="nanochat", llama="llama")[config.recipe]:
            why = f"{', '.join(differ)} has no counterpart there"
    return "nanoheads", why


# what a config must be to have a counterpart in these families; block_size, sizes and dropout aside
LLAMA = dict(pos=("rope",), norm=("rmsnorm",), norm_scale=(True,), act=("swiglu",), bias=(False,),
             qkv_bias=(False,), qk_norm=(False,), embed_norm=(False,), softcap=(0, 0.0), parallel=(False,),
             rope_share=(1.0, 1))
GPT2 = dict(pos=("learned",), norm=("layernorm",), qk_norm=(False,), embed_norm=(False,), softcap=(0, 0.0),
            parallel=(False,), n_kv_head=(None,), head_dim=(None,), norm_eps=(None, 1e-5), qkv_bias=(False,),
            act=("gelu", "gelu_tanh", "relu2"))
NANOCHAT = dict(pos=("rope",), norm=("rmsnorm",), act=("relu2",), bias=(False,), qk_norm=(True,),
                qk_max=(None,), embed_norm=(True,), parallel=(False,), rope_share=(1.0, 1),
                norm_scale=(False,), norm_eps=(None, 1e-6), qkv_bias=(False,), qk_scale=(False,),
                rope_scaling=(None,))


OTHERS = dict(gpt2=GPT2, nanochat=NANOCHAT, llama=LLAMA, qwen2={**LLAMA, "qkv_bias": (True,)},
              qwen3={**LLAMA, "qk_norm": (True,), "qk_scale": (True,), "qk_max": (None,)})


def write_gpt2(model):
    """(config.json, {name: tensor}) of GPT2LMHeadModel. Biases that ours lacks are zeros there."""
    c, w = model.config, model.state_dict()
    names = {act: name for name, act in reversed(ACTIVATIONS.items())}
    config = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], activation_function=names[c.act],
                  n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
                  n_inner=c.n_inner, layer_norm_epsilon=1e-5, resid_pdrop=c.dropout, embd_pdrop=c.dropout,
                  attn_pdrop=c.weight_dropout, tie_word_embeddings=c.tied)
    out = {"transformer.wte.weight": w["transformer.wte.weight"],
           "transformer.wpe.weight": w["transformer.wpe.weight"]}
    if not c.tied:
        out["lm_head.weight"] = w["lm_head.weight"]
    parts = [f"h.{i}.{part}" for i in range(c.n_layer)
             for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")]
    for part in ("ln_f", *parts):
        name = f"transformer.{part}"
        weight = w[name + ".weight"]
        out[name + ".weight"] = weight if weight.dim() == 1 else weight.T
        out[name + ".bias"] = w.get(name + ".bias", weight.new_zeros(len(weight)))
    return config, out


def write_nanochat(model):
    """(config.json, {name: tensor}) of NanoChatForCausalLM."""
    c, w, n = model.config, model.state_dict(), model.config.n_kv_head or model.config.n_head
    config = dict(model_type="nanochat", architectures=["NanoChatForCausalLM"], hidden_act="relu2",
                  max_position_embeddings=c.block_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer,
                  num_attention_heads=c.n_head, num_key_value_heads=n,
                  intermediate_size=c.n_inner or 4 * c.n_embd, attention_dropout=c.weight_dropout,
                  rms_norm_eps=1e-6, attention_bias=False, final_logit_softcapping=c.softcap or None,
                  rope_parameters=dict(rope_type="default", rope_theta=c.rope_base),
                  tie_word_embeddings=c.tied)
    out = {"model.embed_tokens.weight": w["transformer.wte.weight"]}
    if not c.tied:
        out["lm_head.weight"] = w["lm_head.weight"]
    for i in range(c.n_layer):
        ours, theirs = f"transformer.h.{i}.", f"model.layers.{i}."
        q, k, v = w[ours + "attn.c_attn.weight"].split([heads * c.head_size for heads in (c.n_head, n, n)])
        out[theirs + "self_attn.q_proj.weight"] = turned_back(q, c.n_head)
        out[theirs + "self_attn.k_proj.weight"] = turned_back(k, n)
        out[theirs + "self_attn.v_proj.weight"] = v
        out[theirs + "self_attn.o_proj.weight"] = w[ours + "attn.c_proj.weight"]
        out[theirs + "mlp.fc1.weight"] = w[ours + "mlp.c_fc.weight"]
        out[theirs + "mlp.fc2.weight"] = w[ours + "mlp.c_proj.weight"]
    return config, out


def write_llama(model):
    """(config.json, {name: tensor}) of LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM."""
    c, w = model.config, model.state_dict()
    kind, n = "qwen3" if c.qk_scale else "qwen2" if c.qkv_bias else "llama", c.n_kv_head or c.n_head
    rope = dict(rope_type="default", rope_theta=c.rope_base)
    if c.rope_scaling:
        rope.update(rope_type="llama3", **dict(zip(LLAMA3, c.rope_scaling)))
    config = dict(model_type=kind, architectures=[f"{kind.capitalize()}ForCausalLM"], hidden_act="silu",
                  max_position_embeddings=c.block_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer,
                  num_attention_heads=c.n_head, num_key_value_heads=n, head_dim=c.head_size,
                  intermediate_size=model.transformer.h[0].mlp.c_proj.in_features,
                  rms_norm_eps=c.norm_eps or 1e-6, attention_dropout=c.weight_dropout, attention_bias=False,
                  mlp_bias=False, rope_parameters=rope, tie_word_embeddings=c.tied)
    out = {"model.embed_tokens.weight": w["transformer.wte.weight"],
           "model.norm.weight": w["transformer.ln_f.weight"]}
    if not c.tied:
        out["lm_head.weight"] = w["lm_head.weight"]
    sizes = {"attn.c_attn": [heads * c.head_size for heads in (c.n_head, n, n)],
             "mlp.c_fc": [config["intermediate_size"]] * 2}
    for i in range(c.n_layer):
        for ours, theirs in LLAMA_NAMES.items():
            if (t := w.get(f"transformer.h.{i}.{ours}")) is not None:
                parts = t.split(sizes.get(ours.rpartition(".")[0], len(t)))
                out.update({f"model.layers.{i}.{name}": part for name, part in zip(theirs, parts)})
    return config, out


def write_nanoheads(model):
    """(config.json, {name: tensor}) of our own class, modeling_nanoheads.py."""
    c = model.config
    if c.unet and any(fuse.ramp is not None and fuse.ramp < 1 for fuse in model.fuse):
        raise UserError("its U-Net skips have not risen to all that they give, and no folder says how far: "
                        f"train beyond step {c.unet_from + c.unet_ramp}")
    config = dict(model_type="nanoheads", architectures=["NanoHeadsForCausalLM"], gpt=c.flags(),
                  hidden_size=c.n_embd, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
                  max_position_embeddings=c.block_size, tie_word_embeddings=c.tied,
                  auto_map={"AutoConfig": "modeling_nanoheads.NanoHeadsConfig",
                            "AutoModelForCausalLM": "modeling_nanoheads.NanoHeadsForCausalLM"})
    if mine := own.record(c):
        config["own_mechanism"] = [dict(each, file=f"own/{each['file']}") for each in mine]
    return config, {f"gpt.{name}": t for name, t in model.state_dict().items()
                    if not (c.tied and name == "lm_head.weight")}


WRITERS = dict(gpt2=write_gpt2, nanochat=write_nanochat, nanoheads=write_nanoheads,
               **dict.fromkeys(("llama", "qwen2", "qwen3"), write_llama))


def export(model, meta, out, family=None, force=False):
    """Write a model as a Hugging Face folder; (family, why it is no plainer one). UserError, nothing written.

    meta: of its tokenizer; None: no tokenizer files. family: gpt2, nanochat or nanoheads; None: the plainest
    that says the same function. force: replace what is there.
    """
    from safetensors.torch import save_file
    plainest, why = what_it_is(model.config)
    if family not in (None, plainest, "nanoheads"):
        raise UserError(f"this model is no {family}: {why or f'it is a {plainest} model'}")
    family = family or plainest
    config, tensors = WRITERS[family](model)
    end = 50256 if meta and meta["encoding"] == "gpt2" else None
    config.update(vocab_size=model.config.vocab_size, dtype="float32", use_cache=True,
                  bos_token_id=end, eos_token_id=end, pad_token_id=None)
    with new_folder(out, force) as folder:
        save_file({name: t.detach().float().cpu().contiguous() if t.is_floating_point() else t.cpu()
                   for name, t in tensors.items()}, folder / "model.safetensors", metadata=dict(format="pt"))
        write_json(folder / "config.json", config, indent=2)
        write_json(folder / "generation_config.json",
                   dict(bos_token_id=end, eos_token_id=end, pad_token_id=end), indent=2)
        for name, text in tokenizer_files(meta, model.config.block_size).items():
            (folder / name).write_text(text, encoding="utf-8")
        if family == "nanoheads":
            write_code(folder, model.config)
        read(folder)  # what cannot be read back is not left behind
    return family, why if family == plainest else ""


def write_code(folder, config):
    """The files that transformers runs, into a folder, with those of mechanisms of one's own.

    Our own programs read those in the folder own/, as they are; transformers wants all files side by side, so
    that it gets copies with other imports.
    """
    files = own.files_for(config)
    for name in CODE:
        text = as_package((ROOT / name).read_text(encoding="utf-8"))
        if files and name.endswith("modeling_nanoheads.py"):  # their flags join before a config is made
            lines = [f"from .own_mechanism_{i} import {cls.__name__} as Own{i}_{j}\n"
                     for i, file in enumerate(files) for j, cls in enumerate(own.classes_of(file))]
            lines = "".join(lines)
            text = text.replace("from .model import", f"{lines}from .model import add_mechanism, ", 1)
            added = "".join(f"add_mechanism({line.split()[-1]})\n" for line in lines.splitlines())
            text = text.replace("\n\n\nclass ", f"\n\n{added}\n\nclass ", 1)
        (folder / Path(name).name).write_text(text, encoding="utf-8")
    for i, file in enumerate(files):
        own.copy(file, folder / "own")
        code = as_package(file.text.decode("utf-8-sig"))
        (folder / f"own_mechanism_{i}.py").write_text(code, encoding="utf-8")


def as_package(code):
    """Source whose imports of our own modules are relative, as transformers wants the code in a folder."""
    modules = "|".join(Path(name).stem for name in CODE)
    pattern = rf"^([ \t]*)from (?:nanoheads\.)?({modules}) import"
    return re.sub(pattern, r"\1from .\2 import", code, flags=re.M)


@contextmanager
def new_folder(out, force):
    """A folder that gets its name when all is written, and leaves nothing behind otherwise. UserError."""
    from safetensors import SafetensorError
    out = Path(out)
    if out.exists() and not force:
        raise UserError(f"{out} is there already: choose another folder, or --force replaces it")
    # a run has a config.json, too
    if out.exists() and (out.is_symlink() or not is_folder(out) or any(out.glob("*.pt"))):
        raise UserError(f"{out} is no folder of a model in Hugging Face's form: it is not replaced")
    folder, old = (out.with_name(f"{out.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        folder.mkdir(parents=True)
        yield folder
        if out.exists():
            out.rename(old)
        folder.rename(out)
    except (OSError, SafetensorError) as e:  # the latter wraps the system's error
        raise UserError(f"cannot write {out}: {getattr(e, 'strerror', None) or e}") from None
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        for path in (folder, old):
            shutil.rmtree(path, ignore_errors=True)


def tokenizer_files(meta, block_size):
    """{file name: text} of a tokenizer that transformers loads as AutoTokenizer."""
    if not meta:
        return {}
    kind = "GPT2Tokenizer" if meta["encoding"] == "gpt2" else "PreTrainedTokenizerFast"
    about = dict(tokenizer_class=kind, model_max_length=block_size, clean_up_tokenization_spaces=False)
    if meta["encoding"] == "gpt2":
        end = "<|endoftext|>"
        about.update(bos_token=end, eos_token=end, unk_token=end, pad_token=end, add_prefix_space=False)
        files = {"vocab.json": keep(GPT2_ENCODER).read_text(encoding="utf-8"),
                 "merges.txt": keep(GPT2_MERGES).read_text(encoding="utf-8")}
    elif meta["encoding"] == "hf":
        files = {"tokenizer.json": meta["vocab"]}
    else:
        files = {"tokenizer.json": json.dumps(own_tokenizer(meta), ensure_ascii=False)}
    return {**files, "tokenizer_config.json": json.dumps(about, indent=2)}


def own_tokenizer(meta):
    """The tokenizer.json of bytes or characters, a token each: a vocabulary without merges."""
    if meta["encoding"] == "byte":
        symbols, level = byte_symbols(), dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True,
                                              use_regex=False)
        model = dict(type="BPE", vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
        parts = dict(pre_tokenizer=level, decoder=level)
    else:
        model = dict(type="WordLevel", vocab={c: i for i, c in enumerate(meta["vocab"])}, unk_token="")
        each = dict(type="Split", pattern=dict(Regex=r"[\s\S]"), behavior="Isolated", invert=False)
        parts = dict(pre_tokenizer=each, decoder=dict(type="Fuse"))
    return dict(version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None,
                post_processor=None, **parts, model=model)

"""
Reads Hugging Face models into our GPT, and writes our checkpoints as such models. docs/hugging-face.md is for
users.

In:   every program that takes a checkpoint takes a folder of transformers, or the name of one on the hub:
          python train.py config/tiny.py --init_from=gpt2 ...      python sample.py --ckpt DIR
      transformers reads GPT-2, GPT-Neo and the Llama family; what export_hf.py wrote is read here. The logits
      are the original's.
Out:  export_hf.py, without transformers. A plain model becomes one that transformers knows (GPT-2, Llama,
      Qwen, nanochat); every other comes with this repository's model.py, for trust_remote_code=True.

Names of tensors and of config fields are those of transformers 5.24.
"""

import ast
import hashlib
import json
import math
import os
import re
import shutil
import sys
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import torch

from model import MECHANISM_CLASSES, RECIPES, PlainConfig
from nanoheads import own_mechanism
from nanoheads.common import ROOT, UserError, is_there, write_atomic, write_json
from nanoheads.corpus import GPT2_ENCODER, GPT2_MERGES, HOME, gpt2_file
from nanoheads.tokenizer import Tokenizer, byte_symbols, of_text_alone

HUB = re.compile(r"(distil)?gpt2(-medium|-large|-xl)?|([A-Za-z0-9][\w.-]*)/[\w.-]+")
FILES = ["config.json", "model.safetensors*", "*-of-*.safetensors", "vocab.json", "merges.txt",
         "tokenizer.json"]  # what is fetched from the hub
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
MISSING = "{} is read by transformers, which is missing: pip install transformers"
# sha256 of the lines "token id" of GPT-2's 50,257 tokens, in the order of ids
GPT2_VOCABULARY = "dfd729bcc6f1abaa6451126583f5a7eef7f2b2defe741084249792434e49d636"
# what a model needs that transformers lacks
CODE = ("lab/hub/modeling_nanoheads.py", "model.py", "nanoheads/attention.py", "nanoheads/by_hand.py",
        "nanoheads/cpu.py", "nanoheads/kernels.py", "nanoheads/logits.py", "nanoheads/mechanism.py",
        "nanoheads/pruning.py", "nanoheads/rivals.py")


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
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json: fetch it too") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"{path} cannot be read as JSON ({type(e).__name__}): fetch it again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no config, but a {type(config).__name__}")
    return config


def is_name(text):
    """Is it a name on the hub, owner/name or a GPT-2 without one? Every other text is a path.

    So is what looks like a name and begins with a folder that is here, or like the folders of runs.
    """
    match = HUB.fullmatch(str(text))
    if match is None or str(text).endswith((".pt", ".pth", ".bin", ".safetensors")):
        return False
    owner = match[3]
    return owner is None or not (re.match(r"out(-|$)", owner) or Path(owner).exists())


def fetch(name):
    """The local folder of a model by its name on the hub, downloaded if need be. UserError without network.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(MISSING.format(name)) from None
    try:
        return snapshot_download(name, local_files_only=True, allow_patterns=FILES)
    except Exception:  # not in the cache: ask the hub
        pass
    try:
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise OSError("HF_HUB_OFFLINE is set")
        print(f"{name} is no file or folder here: fetching it from the hub", file=sys.stderr)
        return snapshot_download(name, allow_patterns=FILES)
    except Exception as e:  # the hub's errors are many; each says the same to the reader
        raise UserError(f"no checkpoint {name}, and no model of that name could be fetched "
                        f"({type(e).__name__}): put its config.json, model.safetensors and tokenizer files "
                        "into a folder and give that folder") from None


def read(folder):
    """A folder in the form of our checkpoints: dict(model, config, meta, dataset). UserError.

    What export() wrote for our own class is read here, and its code is not run; all else transformers reads.
    """
    c = config_of(folder)
    try:
        for path in Path(folder).glob("*.safetensors"):
            path.open("rb").close()  # safetensors says of one that may not be read that it is not there
    except OSError as e:
        raise UserError(f"{e.filename} cannot be read: {e.strerror}") from None
    kind = c.get("model_type")
    if kind == "nanoheads":
        config, weights = read_ours(folder, c)
    elif isinstance(kind, str) and kind in READERS:
        config, weights = read_theirs(folder, c)
    else:
        raise UserError(f"{folder} holds a {kind} model; known are nanoheads, {', '.join(READERS)}")
    state = dict(model=weights, config=config, meta=tokenizer_of(folder, config), dataset=None)
    if c.get("own_mechanism"):
        state["own_mechanism"] = c["own_mechanism"]
    return state


def check_finite(weights, whose):
    """UserError where a tensor holds what is no number."""
    for name, t in weights.items():
        if t.is_floating_point() and not t.isfinite().all():
            raise UserError(f"{whose}: {name} holds NaN or infinities: its weights are damaged")


def read_ours(folder, c):
    """(config, weights) of what export() wrote for our own class. UserError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    weights, files = {}, sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no model.safetensors")
    for path in files:
        try:
            weights.update({name.removeprefix("gpt."): t for name, t in load_file(path).items()})
        except (OSError, SafetensorError) as e:
            raise UserError(f"{path} is cut short or damaged ({type(e).__name__}): fetch it again") from None
    gpt = c.get("gpt")
    size = isinstance(gpt, dict) and (c.get("vocab_size") or gpt.get("vocab_size"))
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"{Path(folder) / 'config.json'} holds no flags of a model with a vocab_size")
    if gpt.get("tied") and "transformer.wte.weight" in weights:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return {**gpt, "vocab_size": size}, weights


def read_theirs(folder, c):
    """(config, weights) of a model that transformers reads, in float32; c: its config.json. UserError."""
    kind = c["model_type"]
    if c.get("quantization_config"):
        raise UserError(f"{folder} holds quantised weights, which are not known here")
    try:
        import transformers
    except ImportError:
        raise UserError(MISSING.format(folder)) from None
    transformers.logging.set_verbosity_error()  # what it warns of is refused below
    transformers.logging.disable_progress_bar()
    try:
        their_model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True,
            ignore_mismatched_sizes=True)
    except Exception as e:  # its errors are many: a file is missing, cut short, or says what cannot be
        raise UserError(f"{folder}: transformers cannot read it as a {kind} model ({type(e).__name__}: "
                        f"{' '.join(str(e).split())[:200]})") from None
    check_loaded(info, folder, kind)
    try:
        return READERS[kind](their_model.config, their_model.state_dict())
    except UserError as e:
        raise UserError(f"{folder}: {e}") from None


def check_loaded(info, folder, kind):
    """UserError where weights were not those of the config; info: what from_pretrained() says of loading."""
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for"),
                      ("mismatched_keys", "has another size of")):
        if names := sorted(each if isinstance(each, str) else each[0] for each in info[key]):
            raise UserError(f"{folder}: this {kind} model {what} the tensor {names[0]}: a half download, or "
                            "another model's config")


def require_values(c, **values):
    """Raise UserError where a config says something that our GPT has no flag for: {key: the one value}."""
    for key, value in values.items():
        if getattr(c, key, value) != value:
            raise UserError(f"a {c.model_type} model with {key}={getattr(c, key)!r} is not known here, only "
                            f"{value!r}")


def activation(name):
    if name not in ACTIVATIONS:
        raise UserError(f"the activation {name!r} is not known here; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def sizes(c):
    """{flag: value} of the sizes in a config of transformers, by the names that all families know."""
    heads, width = c.num_attention_heads, getattr(c, "head_dim", None)
    return dict(vocab_size=c.vocab_size, tied=c.tie_word_embeddings, block_size=c.max_position_embeddings,
                n_layer=c.num_hidden_layers, n_head=heads,
                n_kv_head=getattr(c, "num_key_value_heads", None), n_embd=c.hidden_size,
                head_dim=None if width == c.hidden_size / heads else width)


def read_gpt2(c, w):
    """GPT-2 and DistilGPT2: nanoGPT's names, with the matrices of Conv1D transposed."""
    require_values(c, layer_norm_epsilon=1e-5, add_cross_attention=False)
    config = dict(sizes(c), recipe="gpt2", bias=True, act=activation(c.activation_function),
                  n_inner=c.n_inner)
    conv = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")
    weights = {name: t.T.contiguous() if conv.search(name) else t for name, t in w.items()}
    for i in range(c.n_layer):
        scale = 1.0 if c.scale_attn_weights else math.sqrt(c.n_embd // c.n_head)
        scale /= i + 1 if c.scale_attn_by_inverse_layer_idx else 1
        for part in ("weight", "bias"):  # ours always divides by the root
            weights[f"transformer.h.{i}.attn.c_attn.{part}"][:c.n_embd] *= scale
    return config, weights


def read_gpt_neo(c, w):
    """GPT-Neo: every other block sees a window, and its logits are not divided by sqrt(D): folded into q."""
    require_values(c, layer_norm_epsilon=1e-5)
    config = dict(sizes(c), recipe="gpt2", bias=True, act=activation(c.activation_function),
                  n_inner=c.intermediate_size)
    local = [i for i, kind in enumerate(c.attention_layers) if kind == "local"]
    if local:
        config.update(window=c.window_size, window_layers=local)
    weights = {name.replace("attn.attention.out_proj", "attn.c_proj"): t for name, t in w.items()}
    for i in range(c.num_layers):
        q, k, v = (weights.pop(f"transformer.h.{i}.attn.attention.{part}_proj.weight") for part in "qkv")
        q = q * math.sqrt(c.hidden_size // c.num_heads)
        weights[f"transformer.h.{i}.attn.c_attn.weight"] = torch.cat((q, k, v))
        weights[f"transformer.h.{i}.attn.c_attn.bias"] = torch.zeros(3 * c.hidden_size)  # it has none
    return config, weights


def read_llama(c, w):
    """Llama, SmolLM2, Mistral without a window, Qwen2 (biases on q, k, v), Qwen3 (q and k normed)."""
    require_values(c, hidden_act="silu", mlp_bias=False, attention_bias=False, use_sliding_window=False)
    if c.model_type == "mistral":
        require_values(c, sliding_window=None)
    qwen2, qwen3 = c.model_type == "qwen2", c.model_type == "qwen3"
    config = {**RECIPES["llama"], **sizes(c), **rope_flags(c), "recipe": "llama", "norm_eps": c.rms_norm_eps,
              "n_inner": c.intermediate_size, "qkv_bias": qwen2, "qk_norm": qwen3, "qk_scale": qwen3}
    weights = {"transformer.wte.weight": w["model.embed_tokens.weight"],
               "transformer.ln_f.weight": w["model.norm.weight"], "lm_head.weight": w["lm_head.weight"]}
    for i in range(c.num_hidden_layers):
        for our_name, their_names in LLAMA_NAMES.items():
            if our_name.startswith("attn.qk_scale") and not qwen3 or our_name.endswith("bias") and not qwen2:
                continue
            parts = [w[f"model.layers.{i}.{name}"] for name in their_names]
            weights[f"transformer.h.{i}.{our_name}"] = torch.cat(parts)
    return config, weights


def rope_flags(c):
    """{flag: value} of a config's rotary positions. UserError: stretched in another way than is known.

    transformers 5 keeps all of them in rope_parameters, version 4 in rope_theta and rope_scaling, where the
    kind was called type at first. Each version leaves a file of the other as it is.
    """
    rope = getattr(c, "rope_parameters", None) or getattr(c, "rope_scaling", None) or {}
    theta = rope.get("rope_theta") or getattr(c, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"RoPE stretched as {kind!r} is not known here: 'default' and 'llama3' are")
    if kind == "default":
        return dict(rope_base=float(theta), rope_scaling=None)
    if missing := [key for key in LLAMA3 if key not in rope]:
        raise UserError(f"RoPE stretched as {kind!r} lacks {', '.join(missing)}")
    return dict(rope_base=float(theta), rope_scaling=[float(rope[key]) for key in LLAMA3])


# our name in a block: theirs, one behind the other
LLAMA_NAMES = {
    "ln_1.weight": ["input_layernorm.weight"], "ln_2.weight": ["post_attention_layernorm.weight"],
    "attn.c_attn.weight": [f"self_attn.{part}_proj.weight" for part in "qkv"],
    "attn.c_attn.bias": [f"self_attn.{part}_proj.bias" for part in "qkv"],
    "attn.c_proj.weight": ["self_attn.o_proj.weight"],
    "attn.qk_scale.0": ["self_attn.q_norm.weight"], "attn.qk_scale.1": ["self_attn.k_norm.weight"],
    "mlp.c_fc.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.c_proj.weight": ["mlp.down_proj.weight"]}
NANOCHAT_NAMES = {
    **{name: LLAMA_NAMES[name] for name in ("attn.c_attn.weight", "attn.c_proj.weight")},
    "mlp.c_fc.weight": ["mlp.fc1.weight"], "mlp.c_proj.weight": ["mlp.fc2.weight"]}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
READERS = dict(gpt2=read_gpt2, gpt_neo=read_gpt_neo,
               **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), read_llama))


# ---- tokenizers in ----

def tokenizer_of(folder, config):
    """meta of a checkpoint, what Tokenizer.from_meta() takes; None where the folder has no tokenizer.

    GPT-2's vocabulary is ours; every other is kept whole, as the text of its tokenizer.json. UserError.
    """
    folder = Path(folder)
    tokenizer_file, vocab = folder / "tokenizer.json", folder / "vocab.json"
    if not is_there(tokenizer_file) and not is_there(vocab):
        return None
    try:
        text = tokenizer_file.read_text(encoding="utf-8") if tokenizer_file.is_file() else ""
        ids = vocabulary(json.loads(text)) if text else json.loads(vocab.read_text(encoding="utf-8"))
        if not all(isinstance(i, int) and i >= 0 for i in ids.values()):
            raise ValueError("an id is no number")
        digest, size = fingerprint(ids), max(ids.values()) + 1
    except UserError as e:
        raise UserError(f"{folder}: {e}") from None
    except OSError as e:
        raise UserError(f"{e.filename} cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"the tokenizer files of {folder} are damaged ({type(e).__name__}): fetch them again"
                        ) from None
    meta = dict(name=folder.name, vocab_size=size)
    if digest == GPT2_VOCABULARY:
        meta.update(encoding="gpt2")
        keep_gpt2(folder, ids, text)
    elif own_meta := own_encoding(ids):
        meta.update(own_meta)
    elif not text:
        raise UserError(f"{folder} has a vocabulary that is not GPT-2's, and no tokenizer.json to read it by")
    else:
        meta.update(encoding="hf", vocab=text, published=True)
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
        path, content = HOME / "gpt2_bpe" / file.name, content.encode()
        if not path.is_file() and hashlib.sha256(content).hexdigest() == file.sha256:
            with suppress(OSError):  # a read-only checkout: they are looked for elsewhere
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, lambda f: f.write(content))


def vocabulary(tokenizer):
    """{token: id} of the dict in a tokenizer.json, added tokens too. UserError."""
    if isinstance(tokenizer["model"].get("vocab"), list):  # Unigram's
        raise UserError("only tokenizers of byte pairs are known here, not Unigram's")
    return {**tokenizer["model"]["vocab"],
            **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}}


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

# what any family may have; a recipe is but a name for other flags
FREE = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_inner", "tied", "rope_base", "recipe",
        "dropout", "attn_dropout", "seed", "zero_init", "checkpoint_activations", "loss_chunks"}
LLAMA = {"n_kv_head", "head_dim", "norm_eps", "rope_scaling"}
# family: (its recipe, flags that may differ from it and from the defaults, {flag: the values it may have})
OTHERS = dict(
    gpt2=("gpt2", {"bias", "norm_scale", "rope_share"},  # the last two do nothing beside the others
          dict(act=("gelu", "gelu_tanh", "relu2"), norm_eps=(None, 1e-5))),
    nanochat=("modern", {"n_kv_head", "head_dim", "softcap"}, dict(norm_eps=(None, 1e-6))),
    llama=("llama", LLAMA, {}),
    qwen2=("llama", LLAMA, dict(qkv_bias=(True,))),
    qwen3=("llama", LLAMA, dict(qk_norm=(True,), qk_scale=(True,))))


def plainest_family(config):
    """(family, why not a plainer one): one of OTHERS, or nanoheads, which needs this repository's code."""
    on = [cls.flag for cls in MECHANISM_CLASSES if cls.is_on(config)]
    if on:
        return "nanoheads", f"{', '.join(on)} {'is' if len(on) == 1 else 'are'} on"
    if config.head_ids is not None:
        return "nanoheads", "heads were pruned"
    for family, (recipe, free, allowed) in OTHERS.items():
        plain = {**{f.name: f.default for f in fields(PlainConfig)}, **RECIPES[recipe]}
        differences = [
            f"{key}={getattr(config, key)!r}" for key in plain
            if key not in FREE | free and getattr(config, key) not in allowed.get(key, [plain[key]])]
        if not differences:
            return family, ""
        if family == dict(gpt2="gpt2", modern="nanochat", llama="llama")[config.recipe]:
            why = f"{', '.join(differences)} has no counterpart there"
    return "nanoheads", why


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


def tensors_by_their_names(model, names):
    """{their name: tensor} of a GPT without positions of its own; names: as LLAMA_NAMES."""
    c, w, n = model.config, model.state_dict(), model.config.n_kv_head or model.config.n_head
    out = {"model.embed_tokens.weight": w["transformer.wte.weight"]}
    if "transformer.ln_f.weight" in w:
        out["model.norm.weight"] = w["transformer.ln_f.weight"]
    if not c.tied:
        out["lm_head.weight"] = w["lm_head.weight"]
    qkv = [heads * c.head_size for heads in (c.n_head, n, n)]
    for i in range(c.n_layer):
        for our_name, their_names in names.items():
            if (t := w.get(f"transformer.h.{i}.{our_name}")) is not None:
                parts = t.split(qkv if our_name.startswith("attn.c_attn") else len(t) // len(their_names))
                out.update({f"model.layers.{i}.{name}": part for name, part in zip(their_names, parts)})
    return out


def their_config(model, kind, name, **other_fields):
    """The fields of config.json that Llama's families and nanochat share, and more."""
    c = model.config
    return dict(model_type=kind, architectures=[f"{name}ForCausalLM"], max_position_embeddings=c.block_size,
                hidden_size=c.n_embd, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
                num_key_value_heads=c.n_kv_head or c.n_head, head_dim=c.head_size,
                intermediate_size=model.transformer.h[0].mlp.c_proj.in_features, attention_bias=False,
                attention_dropout=c.weight_dropout, tie_word_embeddings=c.tied, **other_fields)


def write_nanochat(model):
    """(config.json, {name: tensor}) of NanoChatForCausalLM."""
    c = model.config
    config = their_config(model, "nanochat", "NanoChat", hidden_act="relu2", rms_norm_eps=1e-6,
                          final_logit_softcapping=c.softcap or None,
                          rope_parameters=dict(rope_type="default", rope_theta=c.rope_base))
    tensors = tensors_by_their_names(model, NANOCHAT_NAMES)
    for name, t in tensors.items():
        if ".q_proj." in name or ".k_proj." in name:
            tensors[name] = negate_second_halves(t, c.head_size)
    return config, tensors


def negate_second_halves(w, head_size):
    """Rows [H * D, C] of queries or keys with the second half of each head's negated: RoPE the other way."""
    heads = w.unflatten(0, (-1, 2, head_size // 2)).clone()
    heads[:, 1] *= -1
    return heads.flatten(0, 2)


def write_llama(model):
    """(config.json, {name: tensor}) of LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM."""
    c = model.config
    kind, stretched = "qwen3" if c.qk_scale else "qwen2" if c.qkv_bias else "llama", None
    if c.rope_scaling:
        *factors, length = c.rope_scaling
        stretched = dict(rope_type="llama3", **dict(zip(LLAMA3, (*map(float, factors), int(length)))))
    rope = dict(rope_theta=float(c.rope_base), rope_scaling=stretched,  # as transformers 4 reads them, and 5
                rope_parameters=dict(stretched or dict(rope_type="default"), rope_theta=float(c.rope_base)))
    config = their_config(model, kind, kind.capitalize(), hidden_act="silu", mlp_bias=False,
                          rms_norm_eps=c.norm_eps or 1e-6, **rope)
    return config, tensors_by_their_names(model, LLAMA_NAMES)


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
    if records := own_mechanism.record(c):
        config["own_mechanism"] = [dict(record, file=f"own/{record['file']}") for record in records]
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
    plainest, why = plainest_family(model.config)
    if family not in (None, plainest, "nanoheads"):
        raise UserError(f"this model is no {family}: {why or f'it is a {plainest} model'}")
    family = family or plainest
    config, tensors = WRITERS[family](model)
    check_finite(tensors, "this model")
    end, _ = end_of_text(Tokenizer.from_meta(meta)) if meta else (None, None)  # ValueError: it is damaged
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
    return family, why if family == plainest else ""


def write_code(folder, config):
    """The files that transformers runs, into a folder, with those of mechanisms of one's own.

    Our own programs read those in the folder own/, as they are; transformers wants all files side by side, so
    that it gets copies with other imports.
    """
    files = own_mechanism.files_for(config)
    for name in CODE:
        text = as_package((ROOT / name).read_text(encoding="utf-8"))
        if name.endswith("modeling_nanoheads.py"):  # transformers 4 copies no files but those it names
            imports = "".join(f"from .{Path(path).stem} import __doc__ as _\n" for path in CODE[2:])
            text = text.replace("from .model import", f"{imports}from .model import", 1)
        if files and name.endswith("modeling_nanoheads.py"):  # their flags join before a config is made
            classes = [(f"own_mechanism_{i}", cls.__name__, f"Own{i}_{j}") for i, file in enumerate(files)
                       for j, cls in enumerate(own_mechanism.classes_of(file))]
            imports = "".join(f"from .{module} import {cls} as {name}\n" for module, cls, name in classes)
            text = text.replace("from .model import", f"{imports}from .model import add_mechanism, ", 1)
            calls = "".join(f"add_mechanism({name})\n" for _, _, name in classes)
            text = text.replace("\n\n\nclass ", f"\n\n{calls}\n\nclass ", 1)
        (folder / Path(name).name).write_text(text, encoding="utf-8")
    for i, file in enumerate(files):
        if file.helpers:
            raise UserError(f"{file.path}: a folder for transformers cannot hold {min(file.helpers)}, which "
                            "it imports: put that code into it")
        own_mechanism.copy(file, folder / "own")
        code = as_package(file.text.decode("utf-8-sig"))
        if imports := imports_of_ours(code):
            allowed = ", ".join(Path(name).stem for name in CODE[1:])
            raise UserError(f"{file.path}: a folder for transformers cannot hold its import of {imports[0]}; "
                            f"of our modules it may have {allowed}, by `from MODULE import NAME`")
        (folder / f"own_mechanism_{i}.py").write_text(code, encoding="utf-8")


def as_package(code):
    """Source whose imports of our own modules are relative, as transformers wants the code in a folder."""
    modules = "|".join(Path(name).stem for name in CODE)
    for pattern, relative in (
            (rf"^([ \t]*)from (?:nanoheads\.)?({modules}) import", r"\1from .\2 import"),
            (rf"^([ \t]*)from nanoheads import ((?:{modules})( as \w+)?)[ \t]*$", r"\1from . import \2"),
            (r"^([ \t]*)import (model( as \w+)?)[ \t]*$", r"\1from . import \2")):
        code = re.sub(pattern, relative, code, flags=re.M)
    return code


def imports_of_ours(code):
    """Our own modules that source imports from the repository, and not from its own folder."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in names if name.split(".")[0] in ("model", "nanoheads")]


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
    folder, old_folder = (out.with_name(f"{out.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        folder.mkdir(parents=True)
        yield folder
        if out.exists():
            out.rename(old_folder)
        folder.rename(out)
    except (OSError, SafetensorError) as e:  # the latter wraps the system's error
        raise UserError(f"cannot write {out}: {getattr(e, 'strerror', None) or e}") from None
    finally:
        if old_folder.exists() and not out.exists():
            old_folder.rename(out)
        for path in (folder, old_folder):
            shutil.rmtree(path, ignore_errors=True)


def tokenizer_files(meta, block_size):
    """{file name: text} of a tokenizer that transformers loads as AutoTokenizer."""
    if not meta:
        return {}
    kind = "GPT2Tokenizer" if meta["encoding"] == "gpt2" else "PreTrainedTokenizerFast"
    settings = dict(tokenizer_class=kind, model_max_length=block_size, clean_up_tokenization_spaces=False)
    _, end = end_of_text(Tokenizer.from_meta(meta))
    if end:
        settings.update(bos_token=end, eos_token=end, pad_token=end)
    if meta["encoding"] == "gpt2":
        settings.update(unk_token=end, add_prefix_space=False)
        files = {"vocab.json": gpt2_file(GPT2_ENCODER).read_text(encoding="utf-8"),
                 "merges.txt": gpt2_file(GPT2_MERGES).read_text(encoding="utf-8")}
    elif meta["encoding"] == "hf":
        text = meta["vocab"]
        if not meta.get("published"):  # the run's prompts begin with nothing
            text = json.dumps(of_text_alone(json.loads(text)), ensure_ascii=False)
        files = {"tokenizer.json": text}
    else:
        files = {"tokenizer.json": json.dumps(own_tokenizer(meta), ensure_ascii=False)}
    return {**files, "tokenizer_config.json": json.dumps(settings, indent=2)}


def end_of_text(tokenizer):
    """(id, name) of the token that ends a text; (None, None): there is none, a newline ends but a line."""
    if tokenizer.encoding not in ("gpt2", "hf") or tokenizer.end is None:
        return None, None
    return tokenizer.end, tokenizer.decode([tokenizer.end])


def own_tokenizer(meta):
    """The tokenizer.json of bytes or characters, a token each: a vocabulary without merges."""
    if meta["encoding"] == "byte":
        symbols, level = byte_symbols(), dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True,
                                              use_regex=False)
        model = dict(type="BPE", vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
        parts = dict(pre_tokenizer=level, decoder=level)
    else:
        model = dict(type="WordLevel", vocab={c: i for i, c in enumerate(meta["vocab"])}, unk_token="")
        split = dict(type="Split", pattern=dict(Regex=r"[\s\S]"), behavior="Isolated", invert=False)
        parts = dict(pre_tokenizer=split, decoder=dict(type="Fuse"))
    return dict(version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None,
                post_processor=None, **parts, model=model)

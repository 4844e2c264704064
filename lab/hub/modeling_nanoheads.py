"""A GPT of model.py as a model of transformers: what an exported folder loads with trust_remote_code=True."""

from dataclasses import replace

import torch
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from model import GPT, GPTConfig, KVCache

# what transformers calls a cache: since 5.24 the first name
CACHE = next(name for name in ("cache", "past_key_values")
             if name in CausalLMOutputWithPast.__dataclass_fields__)


class NanoHeadsConfig(PretrainedConfig):
    """gpt: the fields of GPTConfig; beside it the names by which transformers asks for sizes."""

    model_type = "nanoheads"

    def __init__(self, gpt=None, **kwargs):
        self.gpt = gpt or {}
        super().__init__(**kwargs)


class Cache(KVCache):
    """KVCache, with what generate() asks of one."""

    def get_seq_length(self, layer=0):
        return self.length

    def reorder_cache(self, beams):
        """Keep these rows, [B]: what beam search goes on with."""
        for tensors in (self.k, self.v, self.values):
            for key, t in tensors.items() if isinstance(tensors, dict) else enumerate(tensors):
                if t is not None:
                    tensors[key] = t.index_select(0, beams)


class NanoHeadsForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoHeadsConfig
    base_model_prefix = "gpt"
    tables = None  # {name: tensor} of a GPT of this config, made where they were lost
    _tied_weights_keys = {"gpt.lm_head.weight": "gpt.transformer.wte.weight"}  # where the config says so

    def __init__(self, config):
        super().__init__(config)
        # the outer size is the one that resize_token_embeddings() changes
        vocab_size = getattr(config, "vocab_size", None) or config.gpt.get("vocab_size")
        self.gpt = GPT(GPTConfig(**{**config.gpt, "vocab_size": vocab_size}))
        self.post_init()

    def _init_weights(self, module):
        """Tables that no file holds: transformers builds models without memory, and loses them.

        It asks for each module of which something was not in the file: the tables' own, never the model.
        """
        lost_tables = [name for name, _ in module.named_buffers(recurse=False)
                       if name in module._non_persistent_buffers_set]
        if not lost_tables:
            return
        if self.tables is None:
            small = replace(self.gpt.config, vocab_size=1, n_inner=1)  # tables depend on neither
            with torch.device("cpu"):
                self.tables = dict(GPT(small).named_buffers())
        path = next(path for path, m in self.gpt.named_modules() if m is module)
        for name in lost_tables:
            module.get_buffer(name).copy_(self.tables[f"{path}.{name}" if path else name])

    def get_input_embeddings(self):
        return self.gpt.transformer.wte

    def set_input_embeddings(self, embedding):
        self.gpt.transformer.wte = embedding

    def get_output_embeddings(self):
        return self.gpt.lm_head

    def set_output_embeddings(self, head):
        self.gpt.lm_head = head

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # it makes its own: constraint heads and key offset keep more than keys and values

    def forward(self, input_ids, attention_mask=None, past_key_values=None, labels=None, use_cache=None,
                logits_to_keep=0, return_dict=None, num_items_in_batch=None, position_ids=None, cache=None,
                **ignored):
        """input_ids [B, T] -> logits [B, T, V]; labels as everywhere in transformers: -100 is not scored.

        num_items_in_batch: what Trainer divides the sum over a whole batch by; None: the labels here.

        Padding may stand left, or right where no cache is kept: no token sees it. position_ids say nothing
        that a row does not: others than its own count, as of packed documents, are refused.
        """
        cache = past_key_values if cache is None else cache
        if not isinstance(cache, (Cache, type(None))):
            raise ValueError(f"the cache is a {type(cache).__name__}; this model makes its own: "
                             "leave it out, or pass what an earlier call returned")
        before = padding(attention_mask, cache is not None or use_cache)
        if position_ids is not None and before is None:
            n_cached = cache.length if cache else 0
            row_positions = torch.arange(input_ids.size(-1), device=input_ids.device) + n_cached
            if not bool((position_ids == row_positions).all()):
                raise ValueError("position_ids count otherwise than the tokens of a row: this model knows no "
                                 "packed documents; give each its own row")
        if cache is None and use_cache:
            cache = Cache(self.gpt.config)
        x = self.gpt.hidden(input_ids, cache, before)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.gpt.head(x if labels is not None else x[:, keep]), None
        if labels is not None:
            nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100,
                                   reduction="mean" if num_items_in_batch is None else "sum")
            loss = nats if num_items_in_batch is None else nats / num_items_in_batch
            logits = logits[:, keep]
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
        return out if return_dict is not False else out.to_tuple()


def padding(mask, cached):
    """The columns of padding before each row, [B]; None: there are none. mask [B, S]: 0 at padding."""
    if mask is None or bool(mask.all()):
        return None
    mask = (mask != 0).long()
    before = (mask.cumsum(1) == 0).sum(1)
    begins = (mask.diff(dim=1) == 1).sum(1) + mask[:, 0]  # how often a row's text begins
    if bool((begins > 1).any()):
        raise ValueError("attention_mask has zeros inside a row's text: padding is at its ends alone")
    if cached and bool((mask.sum(1) + before != mask.size(1)).any()):
        raise ValueError("attention_mask has zeros behind a row's text: pad left to generate")
    return before if bool(before.any()) else None

# The three recipes, and the modern one without each of its ingredients: changes known to matter, which a
# comparison must find. The plain GPT is the modern recipe; equal FLOPs and equal time are in the page

question = "What is each ingredient of the modern recipe worth, and which recipe is best?"

adamw = dict(optimizer="adamw", lr=8e-3, min_lr=0.0, weight_decay=0.1)  # its rate is tuned too
variants = {
    "gpt2": dict(recipe="gpt2", qk_max=None, **adamw),
    "llama": dict(recipe="llama", qk_max=None),
    "llama, grouped": dict(recipe="llama", qk_max=None, n_kv_head=2),
    "llama, AdamW": dict(recipe="llama", qk_max=None, **adamw),
    "positions learned": dict(pos="learned"),
    "no positions": dict(pos="none"),
    "no QK-norm": dict(qk_norm=False, qk_max=None),
    "GELU": dict(act="gelu"),
    "SwiGLU": dict(act="swiglu"),
    "tied": dict(tied=True),
    "not started at zero": dict(zero_init=False),
    "embedding not normed": dict(embed_norm=False),
    "AdamW": adamw,
}
del adamw
tune_lr = True

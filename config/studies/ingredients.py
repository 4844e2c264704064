# The modern recipe without each of its ingredients: changes known to matter, which a comparison must find.
# The recipes as a whole: config/studies/recipes.py

question = "What is each ingredient of the modern recipe worth?"

variants = {
    "positions learned": dict(pos="learned"),
    "no positions": dict(pos="none"),
    "no QK-norm": dict(qk_norm=False, qk_max=None),
    "GELU": dict(act="gelu"),
    "SwiGLU": dict(act="swiglu"),
    "tied": dict(tied=True),
    "not started at zero": dict(zero_init=False),
    "embedding not normed": dict(embed_norm=False),
    "AdamW": dict(optimizer="adamw", adamw_lr=8e-3, min_lr=0.0, weight_decay=0.1),
}

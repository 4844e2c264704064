# Controls: changes that others have shown to help, or to hurt, and changes that cannot help. A comparison is
# worth what it says of them; docs/results/controls.md has what is expected of each, and from where
# tests/controls.py has noise and parameters without effect; a third mode of it looks ahead, and is refused

question = "Does a comparison find what is known, and nothing else?"

mechanisms = ["tests/controls.py:control_noise", "short_conv", "query_gain"]
variants = {
    "parameters without effect": dict(control="dead"),
    "AdamW for Muon": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=8e-3, min_lr=0.0, weight_decay=0.1),
    "learned positions for RoPE": dict(pos="learned"),
    "no QK-norm": dict(qk_norm=False, qk_max=None),
    "QK-norm without a gain": dict(qk_max=None),
    "plain again": dict(seed=1000),
}
match_parameters = True

# The three recipes at equal FLOPs, each at its own best rates. The plain GPT is the modern recipe; what each
# of its ingredients is worth by itself: docs/results/recipe.md
# gpt2 starts from 8e-3: from 2e-3 eight times as much was best, the end of what is tried. embed_lr is as
# high as adamw_lr, as AdamW has it by default; the scale's own was tuned for Muon

question = "Which recipe is best?"

adamw = dict(optimizer="adamw", min_lr=0.0, weight_decay=0.1)
variants = {
    "gpt2": dict(recipe="gpt2", qk_max=None, adamw_lr=8e-3, embed_lr=8e-3, **adamw),
    "llama": dict(recipe="llama", qk_max=None, optimizer="muon"),
    "llama, grouped": dict(recipe="llama", qk_max=None, optimizer="muon", n_kv_head=2),
    "llama, AdamW": dict(recipe="llama", qk_max=None, adamw_lr=8e-3, embed_lr=8e-3, **adamw),
    "AdamW": dict(adamw_lr=8e-3, embed_lr=8e-3, **adamw),
}
del adamw
tune_lr = True

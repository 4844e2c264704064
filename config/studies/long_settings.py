# What makes the scale long use its context? The plain GPT with sharper attention, without QK-norm, with other
# positions, fewer heads, or more sequences in fewer steps; on validation, since its answer chooses a scale.
# The last three were added when rope_base 1000 was seen to be better
# 20 runs of a minute or so on a core; python -m lab.probe late says how far back each of them reads

question = "With which settings does a plain GPT learn from a context of 1,024 bytes?"

scale = "long"
settings = dict(rope_base=10000.0)  # as config/long.py had it before this study
variants = {
    "scores up to 24": dict(qk_max=24.0),
    "no QK-norm": dict(qk_norm=False, qk_max=None),
    "two heads": dict(n_head=2),
    "half rotary": dict(rope_share=0.5),
    "rope_base 1000": dict(rope_base=1000.0),
    "batch 4, 480 steps": dict(batch_size=4, max_iters=480),
    "rope_base 300": dict(rope_base=300.0),
    "rope_base 100": dict(rope_base=100.0),
    "rope_base 1000, two heads": dict(rope_base=1000.0, n_head=2),
}
seeds = [111, 112]
plain_seeds = 2
budgets = []
split = "val"
test_tokens = 200_000
match_parameters = False
rescore = 0

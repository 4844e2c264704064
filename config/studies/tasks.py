# What can each mechanism learn that the plain GPT cannot? All that differ in what they compute, on all tasks
# The task scale: 2,200 runs of ten seconds or so on a core, fewer where a run ends since it is right
# At the rates of config/task.py, which the plain GPT learns most tasks at; --tune_lr=True looks for each
# one's best rates first, in 18 runs more for each variant of each task: leave most of the variants out then

question = "What can these heads learn that a plain GPT cannot?"

task = ["all"]
# without what changes no number here: agency, whose states nothing moves, and a cap of 50 on scores of 12
mechanisms = [
    "short_conv*", "value_*", "query_gain", "ssmax", "key_offset", "xsa", "head_*", "routing_*", "moh",
    "sentinel*", "a2c_*", "roles", "alibi*", "relative_bias", "fox", "paired_heads", "diff*", "output_gate*",
    "constraint_*", "acag*", "sink", "depth_attention", "mudd", "stream_scalars", "unet_*", "window*"]
seeds = [1, 2, 3, 4, 5]
settings = dict(task_enough=0.99)  # of answers right, over all levels: then a run has nothing left to show

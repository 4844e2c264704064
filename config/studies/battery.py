# The battery: every mechanism that the public record knows (results/outside.md), at one of the cheap scales,
# to see which scale orders mechanisms as the record does. Once for each:
#   python compare.py config/studies/battery.py --scale=deep       # tiny, deep, long, bpe
# The tasks are in config/studies/tasks.py, and python -m lab.study.transfer FILES says which of them predicts
# 80 runs a scale of half a minute to two on a core; at the plain GPT's rates, without other budgets
# Scored on 200,000 tokens of the test split, evenly spaced and the same for all: at bpe the whole split would
# take longer than the training

question = "Which cheap setting orders mechanisms as the public record does?"

mechanisms = ["short_conv", "short_conv_kv", "short_conv_x", "key_offset", "value_residual",
              "value_embedding", "query_gain", "fox", "stream_scalars", "diff", "diff_v1", "paired_heads",
              "head_mix", "depth_attention", "mudd", "xsa", "head_norm", "output_gate",
              "output_gate_elementwise", "output_gate_narrow", "moh", "sink", "unet_scalar", "window"]
seeds = [1, 2, 3]
plain_seeds = 8
budgets = []
test_tokens = 200_000
match_parameters = False

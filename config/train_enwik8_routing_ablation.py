# The plain GPT of the head-routing write-up's pair, with the sizes and steps of config/paper.py
# 200,000 steps are 4.3e18 FLOPs: at 40 % of the peak (bfloat16) 9.5 hours on an A100, 3.0 on an H100

out_dir = "out-enwik8-routing-ablation"
scale = "paper"

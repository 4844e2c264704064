# The routed GPT of the head-routing write-up's pair: six of twelve heads for each token, as printed
# 200,000 steps are 4.4e18 FLOPs: at 40 % of the peak (bfloat16) 9.8 hours on an A100, 3.1 on an H100

out_dir = "out-enwik8-routing"
scale = "paper"
mechanism = ["routing_published"]

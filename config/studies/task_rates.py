# The rates of Muon and AdamW on tasks: a grid for what differs from the plain GPT at the shared rates, and
# for the plain GPT; then the best of each with fresh seeds. Its first runs are those of studies/tasks.py
# Eighteen runs for each pair of a mechanism and a task that differ, and as many seeds more as were judged

question = "What can these heads learn that a plain GPT cannot, at each one's best rates?"

task = ["recall", "noisy_recall", "copy"]
mechanisms = ["routing_moh", "sentinel", "a2c_temperature", "acag", "constraint_a", "unet_scalar",
              "key_offset", "short_conv", "output_gate", "xsa", "fox", "value_residual"]
seeds = [1, 2, 3, 4, 5]
tune_lr = True
settings = dict(task_enough=0.99)

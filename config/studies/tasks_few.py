# A first look at which mechanisms learn what the plain GPT does not: three tasks, a mechanism of each kind
# 225 runs of ten seconds or so on a core, all of them among those of config/studies/tasks.py

question = "What can these heads learn that a plain GPT cannot?"
task = ["recall", "noisy_recall", "copy"]
mechanisms = ["routing_moh", "sentinel", "a2c_temperature", "acag", "constraint_a", "unet_scalar",
              "key_offset", "short_conv", "output_gate", "xsa", "fox", "value_residual"]
seeds = [1, 2, 3, 4, 5]
settings = dict(task_enough=0.99)

# Every mechanism in every mode, and every rival, against plain GPTs: the same hyperparameters, parameters, training FLOPs
# Tiny scale: 28 variants and the plain GPT, 5 seeds, about a minute each on a core; then the best four against all three baselines

question = "Does any head mechanism or rival beat a plain GPT?"

mechanisms = ["routing_inf", "routing_zero", "routing_train_only", "routing_moh", "routing_sigmoid", "sentinel", "sentinel_l0", "head_norm",
              "agency", "unet_concat", "unet_add", "unet_published", "constraint_a", "constraint_b", "constraint_published", "a2c_published",
              "a2c_temperature", "a2c_key_bias", "acag", "acag_elementwise", "acag_detach", "acag_published",
              "moh", "output_gate", "output_gate_elementwise", "window", "window_global_random", "all_on"]
matched = 4

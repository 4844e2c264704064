# Sliding windows, with global tokens and random blocks too (Longformer, BigBird), rivals

question = "What does attention to a quarter of the context cost?"

mechanisms = ["window", "window_global_random"]

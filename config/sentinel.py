# Sentinel gates: one learned gate per head, starting near 1, and a small price on their sum
# sentinel_l0: gates that can close for good, the L0 penalty; head_norm: what their source does before gates

scale = "tiny"
mechanism = ["sentinel"]

# Sentinel gates: a learned gate per head, literal and with real zeros, and the write-up's normalisation of each head

question = "Do learned gates, one per head, beat a plain GPT?"

mechanisms = ["sentinel", "sentinel_l0", "head_norm"]

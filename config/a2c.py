# A2C attention, corrected: a temperature per head and token; critic and value head learn from returns to come
# a2c_key_bias: each key's predicted advantage is added to its logits; a2c_published: as the write-up has it

scale = "tiny"
mechanism = ["a2c_temperature"]

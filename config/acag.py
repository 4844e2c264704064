# ACAG: a gate per head from the context length and the entropy and concentration of its attention row
# acag_elementwise: a gate for each dimension; acag_detach: no gradient into the row, cheaper; acag_published:
# the write-up's own. No fused kernel takes dropout on the attention weights here, so this turns it off: at
# paper scale the plain GPT to compare with is --scale=paper --attn_dropout=0

scale = "tiny"
mechanism = ["acag"]

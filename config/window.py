# A sliding window, from the literature: a token sees a quarter of the context, itself included
# window_global_random: as in BigBird, the first token, too, and one earlier block at random. No fused kernel
# takes dropout on the attention weights here, so this turns it off: at paper scale the plain GPT to compare
# with is --scale=paper --attn_dropout=0

scale = "tiny"
mechanism = ["window"]

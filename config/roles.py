# Heads with roles: some prefer near tokens, some far ones, some the token before, and some are left free
# Each role's prior is added to the logits of its heads, with a strength that is learned: --roles_strength=0
# starts as the plain GPT, --roles=previous,free gives every other head a role

scale = "tiny"
mechanism = ["roles"]

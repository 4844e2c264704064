# Agency: states and consent per head. While nothing moves them every head is active: this is the plain GPT
# agency_learned: states predicted from what is measured of the heads while training
# agency_mlp, agency_block: each MLP, or each whole block, has a state in place of the heads

scale = "tiny"
mechanism = ["agency"]

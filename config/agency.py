# Agency: states and consent per head. While nothing moves them every head is active: this is the plain GPT
# agency_learned: states predicted from what is measured of the heads while training

scale = "tiny"
mechanism = ["agency"]

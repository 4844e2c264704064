# Agency: states and consent per head. While nothing moves them every head is active: this is the plain GPT

scale = "tiny"
mechanism = ["agency"]

# The rival exclusive self-attention: what a head's own value says is taken out of its output

scale = "tiny"
mechanism = ["xsa"]

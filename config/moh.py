# The rival MoH: each token uses one shared head and the best of the others, in sum half of all, load balanced
# With more heads its paper shares more of them: --routing_shared=2 --routing_top_k=6

scale = "tiny"
mechanism = ["moh"]

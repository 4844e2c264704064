# Head routing as its write-up prints it: each token uses half of the heads, unselected logits are multiplied
# by 0, and the gates, which sum to 1, work in training alone. Its other forms: routing_inf (the softmax over
# the selected alone), routing_zero, routing_train_only, routing_moh, routing_sigmoid; and the rival moh,
# which with more heads shares more of them: --routing_shared=2 --routing_top_k=6

scale = "tiny"
mechanism = ["routing_published"]

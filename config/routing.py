# Head routing as its write-up has it: each token uses half of the heads, whose weights sum to 1 (the output
# starts small). Its other forms: routing_zero, routing_train_only, routing_moh, routing_sigmoid

scale = "tiny"
mechanism = ["routing_inf"]

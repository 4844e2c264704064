# Head routing: the write-up's, its ablations (all heads, rescaled gates, no entropy term, gates in training only, mask by
# multiplication), and its corrected forms

question = "Does top-k head routing beat a plain GPT, and if so, which part of it?"

mechanisms = ["routing_inf", "routing_zero", "routing_train_only", "routing_moh", "routing_sigmoid"]
variants = {
    "routing, all heads": dict(routing="published", routing_top_k="n_head"),       # the router without the selection
    "routing, rescaled": dict(routing="moh", routing_hidden="n_embd // 2", routing_coef=0.0),  # the same router, weights of mean 1
    "routing, no entropy": dict(routing="published", routing_coef=0.0),            # without the term that should make heads specialise
}

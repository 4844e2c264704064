# Head routing: the write-up's, its ablations (all heads, rescaled gates, no entropy term, gates in training
# only, mask by multiplication), and its corrected forms

question = "Does top-k head routing beat a plain GPT, and if so, which part of it?"

_inf = dict(routing="published", routing_mask="inf", routing_eval_gate=True)

mechanisms = ["routing_*"]
variants = {
    "routing, all heads": dict(_inf, routing_top_k="n_head"),   # the router without the selection
    "routing, rescaled": dict(routing="moh", routing_hidden="n_embd // 2", routing_coef=0.0),  # mean weight 1
    "routing, no entropy": dict(_inf, routing_coef=0.0),        # without what should make heads specialise
}
contrasts = [["routing_inf", "routing, no entropy"], ["routing_inf", "routing, all heads"]]

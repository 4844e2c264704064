# Changes of the attention scores against the plain GPT: a cap, biases by distance, the logarithm of the
# context, a forget gate; at the plain GPT's learning rates, on two texts
# Tiny scale: 78 runs of half a minute to a minute on a core, and a wider plain GPT for what seems better

question = "Does a change of the attention scores beat a plain GPT?"

mechanisms = ["score_cap", "alibi", "alibi_learned", "relative_bias", "ssmax", "fox"]
variants = {
    "score_cap 8": dict(score_cap=8.0),  # qk_max is 12 here, so that Gemma 2's 50 hardly acts
}

texts = ["wikitext2_byte", "enwiki15"]
seeds = [1, 2, 3, 4]
budgets = []  # what a difference is worth in compute is asked of what wins

# Dose and response: plain GPTs that train for a little longer, or whose logits have another bound, compared
# as if they were mechanisms. Their gain is known, so this shows which gains a comparison finds
# Tiny scale: about 130 runs; `python tests/simulate.py --only=dose` reads the file that it gives

question = "How large must a gain be to be found?"

variants = {f"{more:g} x the budget": dict(max_iters=round(960 * more))
            for more in (1.02, 1.05, 1.1, 1.2, 1.4, 2)}
variants |= {f"logits up to {bound}": dict(qk_max=bound) for bound in (6.0, 24.0)}
variants["logits without a bound of their own"] = dict(qk_max=None)  # sqrt(head size) = 4
budgets = []
match_parameters = False
seeds = list(range(1, 11))
plain_seeds = 24

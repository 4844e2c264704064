# Which rates suit AdamW in place of NorMuon at the tiny scale? That of the embedding had been that of all
# else. On validation, with a seed that judges nothing, before interactions_gate_rate.py; 200,000 tokens

question = "Which rates suit AdamW at the tiny scale?"

variants = {
    "0.008, embedding 0.02": dict(optimizer="adamw", adamw_lr=0.008, embed_lr=0.02, min_lr=0.0,
                                  weight_decay=0.1),
    "0.008, embedding 0.08": dict(optimizer="adamw", adamw_lr=0.008, embed_lr=0.08, min_lr=0.0,
                                  weight_decay=0.1),
    "0.016, embedding 0.04": dict(optimizer="adamw", adamw_lr=0.016, embed_lr=0.04, min_lr=0.0,
                                  weight_decay=0.1),
    "0.004, embedding 0.04": dict(optimizer="adamw", adamw_lr=0.004, embed_lr=0.04, min_lr=0.0,
                                  weight_decay=0.1),
    "0.008, embedding 0.04, no decay": dict(optimizer="adamw", adamw_lr=0.008, embed_lr=0.04, min_lr=0.0,
                                            weight_decay=0.0),
}
seeds = [101]
plain_seeds = 2
split = "val"
budgets = []
test_tokens = 200_000
match_parameters = False

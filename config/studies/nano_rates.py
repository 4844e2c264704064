# The plain GPT's rates at 0.33 M parameters: each rate by itself at half and at double of what config/nano.py
# had, the momentum by its memory of 1 / (1 - momentum) steps, two seeds, on validation: chosen here, judged
# elsewhere. 18 runs of nine minutes on a core of a Zen 4

question = "At which rates is the plain GPT of 0.33 M parameters at its best?"

scale = "nano"
size = "0.33M"
settings = dict(dataset="enwiki15", muon_lr=0.02, adamw_lr=0.004, embed_lr=0.02, muon_momentum=0.9)
tokens_per_param = 20.0
variants = {
    "muon_lr 0.01": dict(muon_lr=0.01),
    "muon_lr 0.04": dict(muon_lr=0.04),
    "adamw_lr 0.002": dict(adamw_lr=0.002),
    "adamw_lr 0.008": dict(adamw_lr=0.008),
    "embed_lr 0.01": dict(embed_lr=0.01),
    "embed_lr 0.04": dict(embed_lr=0.04),
    "muon_momentum 0.8": dict(muon_momentum=0.8),
    "muon_momentum 0.95": dict(muon_momentum=0.95),
}
split = "val"
seeds = [111, 112]
plain_seeds = 2
budgets = []
match_parameters = False

# Is the gain of short convolutions one of rates? The plain GPT of 0.33 M parameters with and without them, at
# half and at double of all rates. The runs at the rates of config/nano.py are those of
# config/studies/ladder.py; eight more of eight minutes on a core stand beside them

question = "Does the gain of short convolutions stay at other learning rates?"

scale = "nano"
size = "0.33M"
settings = dict(dataset="enwiki15")
tokens_per_param = 20.0
mechanisms = ["short_conv_kv"]
variants = {
    "half rates": dict(muon_lr=0.01, adamw_lr=0.002, embed_lr=0.01, mechanism_lr=0.002),
    "short_conv_kv at half rates": dict(short_conv="kv", muon_lr=0.01, adamw_lr=0.002, embed_lr=0.01,
                                        mechanism_lr=0.002),
    "double rates": dict(muon_lr=0.04, adamw_lr=0.008, embed_lr=0.04, mechanism_lr=0.008),
    "short_conv_kv at double rates": dict(short_conv="kv", muon_lr=0.04, adamw_lr=0.008, embed_lr=0.04,
                                          mechanism_lr=0.008),
}
contrasts = [["short_conv_kv at half rates", "half rates"],
             ["short_conv_kv at double rates", "double rates"]]
seeds = [1, 2]
plain_seeds = 2
test_tokens = 1_500_000
budgets = []
match_parameters = False

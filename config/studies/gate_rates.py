# At which rate do an output gate's own weights learn best, under NorMuon and under AdamW? On validation, with
# seeds that judge nothing, before interactions_gate_rate.py. Tiny scale, two seeds, 200,000 tokens: 16 runs

question = "Which rate of its own suits an output gate, under NorMuon and under AdamW?"

variants = {
    "gate, 0.008": dict(output_gate="headwise", mechanism_lr=0.008),
    "gate, 0.032": dict(output_gate="headwise", mechanism_lr=0.032),
    "gate, 0.128": dict(output_gate="headwise", mechanism_lr=0.128),
    "AdamW": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=8e-3, min_lr=0.0, weight_decay=0.1),
    "AdamW, gate, 0.008": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=8e-3, min_lr=0.0, weight_decay=0.1,
                               output_gate="headwise", mechanism_lr=0.008),
    "AdamW, gate, 0.032": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=8e-3, min_lr=0.0, weight_decay=0.1,
                               output_gate="headwise", mechanism_lr=0.032),
    "AdamW, gate, 0.128": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=8e-3, min_lr=0.0, weight_decay=0.1,
                               output_gate="headwise", mechanism_lr=0.128),
}
seeds = [101, 102]
plain_seeds = 2
split = "val"
budgets = []
test_tokens = 200_000
match_parameters = False

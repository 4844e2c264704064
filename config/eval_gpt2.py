# OpenAI's GPT-2 (124M) on OpenWebText, evaluated once: nanoGPT reports 3.11 nats on train, 3.12 on val
# The larger ones: --init_from=gpt2-medium, gpt2-large, gpt2-xl, or the files beside this one

init_from = "gpt2"
eval_only = True
dataset = "openwebtext"

batch_size = 8
eval_tokens = 500 * 8 * 1024    # as many as nanoGPT's 500 batches, evenly spaced

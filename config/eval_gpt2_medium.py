# OpenAI's GPT-2 (350M) on OpenWebText, evaluated once: nanoGPT reports 2.85 nats on train, 2.84 on val

init_from = "gpt2-medium"
eval_only = True
dataset = "openwebtext"

batch_size = 8
eval_tokens = 500 * 8 * 1024    # as many as nanoGPT's 500 batches, evenly spaced

# OpenAI's GPT-2 (774M) on OpenWebText, evaluated once: nanoGPT reports 2.66 nats on train, 2.67 on val

init_from = "gpt2-large"
eval_only = True
dataset = "openwebtext"

batch_size = 8
eval_tokens = 500 * 8 * 1024    # as many as nanoGPT's 500 batches, evenly spaced

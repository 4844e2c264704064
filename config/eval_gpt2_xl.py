# OpenAI's GPT-2 (1558M) on OpenWebText, evaluated once: nanoGPT reports 2.56 nats on train, 2.54 on val

init_from = "gpt2-xl"
eval_only = True
dataset = "openwebtext"

batch_size = 8
eval_tokens = 500 * 8 * 1024    # as many as nanoGPT's 500 batches, evenly spaced

# SmolLM2 -> a gate on each head's output over pretrained weights of the Llama kind; --init_from takes any
# Llama, Qwen2 or Qwen3 whose tokenizer is of byte pairs. First the text in its tokens:
#     python data/prepare_text.py --source=my.txt --encoding=hf --tokenizer=SmolLM2-135M \
#         --out=data/mine-smollm2
# 4 sequences x 8 x 1,024 = 32,768 tokens a step
# In a minute on a core, over a GPT of our own (--recipe=llama --qk_max=none: one of that kind):
#     python train.py --scale=tiny
#     python train.py config/finetune_smollm2.py --init_from=out/tiny --dataset=wikitext2_byte \
#         --grad_accum=4 --adamw_lr=3e-4 --mechanism_lr=3e-3 --eval_tokens=16384 --block_size=128

init_from = "HuggingFaceTB/SmolLM2-135M"
dataset = "data/mine-smollm2"
block_size = 1024         # of its 8,192

xsa = True

batch_size = 4
grad_accum = 8
max_iters = 300
warmup_iters = 30

optimizer = "adamw"
adamw_lr = 3e-5
min_lr = 3e-6
mechanism_lr = 3e-4

eval_interval = 50

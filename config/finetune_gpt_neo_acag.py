# GPT-Neo -> ACAG: a gate per head over pretrained weights, on documents of 128 to 2,048 tokens
# A row is one document, or an even part of a longer one, of a length that each pass draws anew: the gate
# reads the context length, and attention never crosses documents. 65,536 tokens a step at most
# --dataset=openwebtext has documents of all lengths; --init_from may be a folder that holds the model
# In a minute on a core, over a GPT of our own:
#     python train.py --scale=tiny
#     python train.py config/finetune_gpt_neo_acag.py --init_from=out/tiny --dataset=wikitext2_byte \
#         --documents=16 --grad_accum=4 --adamw_lr=3e-4 --mechanism_lr=3e-3 --eval_tokens=16384

init_from = "EleutherAI/gpt-neo-125m"
dataset = "wikitext2"
documents = 128

acag = "headwise"
attn_dropout = 0.0        # no fused kernel has it beside acag

batch_size = 4
grad_accum = 8
max_iters = 300
warmup_iters = 30

optimizer = "adamw"
adamw_lr = 5e-5
min_lr = 5e-6
mechanism_lr = 5e-4       # gates: 10 x lr

eval_interval = 50

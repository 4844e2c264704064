# GPT-2 -> adaptive GPT-2: gates, head states and U-Net skips over pretrained weights, which they leave as
# they are at the start; --init_from=distilgpt2, gpt2-medium, ..., or a folder that holds one of them
# 4 sequences x 8 x 1,024 = 32,768 tokens a step, 9 steps a pass over Shakespeare; --dataset=wikitext2: 75
# In a minute on a core, over a GPT of our own:
#     python train.py --scale=tiny
#     python train.py config/finetune_gpt2.py --init_from=out/tiny --dataset=wikitext2_byte --grad_accum=4 \
#         --adamw_lr=3e-4 --mechanism_lr=3e-3 --skip_lr=3e-5 --eval_tokens=16384

init_from = "gpt2"
dataset = "shakespeare"

sentinel = "sigmoid"
agency = True
unet = "concat"
unet_from = 50            # gates first: skips are not there before this step,
unet_ramp = 50            # and rise over so many
# freeze_trunk = True     # only what is added is trained,
# thaw_from = 100         # up to this step

batch_size = 4
grad_accum = 8
max_iters = 300
warmup_iters = 30

optimizer = "adamw"
adamw_lr = 3e-5                 # nanoGPT's, for this data
min_lr = 3e-6
mechanism_lr = 3e-4       # gates: 10 x adamw_lr, below which no gate moves in that time
skip_lr = 3e-6            # skips: adamw_lr / 10, since each is a whole matrix that reads the unnormed stream

eval_interval = 50

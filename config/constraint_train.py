# Constraint heads whose scorers are trained, here on weak labels (unchecked), made by
#     python -m lab.label --dataset=wikitext2_byte --by=weak
# Then python -m lab.probe constraints score --ckpt out/constraint_train --plain out/<a plain GPT> \
#     --labels=weak
# Tiny scale: a minute on a core

scale = "tiny"
out_dir = "out/constraint_train"
constraint_names = ["reciprocity", "testifiability", "decidability"]

labels = "weak"
constraint_coef = 0.2      # the write-up's 0.1 to 0.3
constraint_warmup = 100

# Constraint heads trained on weak labels: what the loss on labels costs the language model, by its weight,
# warm-up, stopped gradient, gate and router; a teacher in place of labels. What the heads then know:
# `python -m lab.probe constraints` on these runs
# Tiny scale: 75 runs of about a minute on a core, those of the plain GPT aside; labels and teacher first:
#     python -m lab.label --dataset=wikitext2_byte --by=weak        # and --by=synthetic

question = "Do constraint heads learn their labels, at what cost in bits per byte?"

first = {"out/constraint_teacher":
         "python train.py config/constraint_train.py --seed=9 --out_dir=out/constraint_teacher"}

_names = ["reciprocity", "testifiability", "decidability"]
_heads = dict(constraint_names=_names)
_labels = dict(_heads, labels="weak", constraint_warmup=100)

variants = {
    "no labels": _heads,
    "labels": _labels,
    "coef 0.05": dict(_labels, constraint_coef=0.05),
    "coef 1": dict(_labels, constraint_coef=1.0),
    "coef 1, no warm-up": dict(_labels, constraint_coef=1.0, constraint_warmup=0),
    "coef 1, stopped": dict(_labels, constraint_coef=1.0, constraint_stop=480),
    "B": dict(_labels, constraint_variant="B"),
    "published": dict(_labels, constraint_mode="published"),
    "gate on scores": dict(_labels, constraint_gate="score"),
    "router pays": dict(_labels, constraint_entropy_coef=0.02, constraint_sparsity_coef=0.02),
    "positives": dict(_labels, constraint_focal=2.0, constraint_positive_coef=5.0),
    "first token": dict(_labels, constraint_router_input="first"),
    "teacher, kl": dict(_heads, teacher="out/constraint_teacher", constraint_match="kl"),
    "teacher, huber": dict(_labels, teacher="out/constraint_teacher", constraint_match="huber"),
    "synthetic": dict(_labels, labels="synthetic"),
}
contrasts = [["labels", "no labels"], ["coef 1", "no labels"], ["coef 1, stopped", "coef 1"]]
seeds = [1, 2, 3, 4, 5]
plain_seeds = 5
budgets = []
match_parameters = False

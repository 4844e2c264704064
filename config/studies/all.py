# Every mechanism in every mode, and every rival, against the plain GPT: all of them with two seeds on
# WikiText-2's validation; those that go on get their own best rates there, and are judged with eight fresh
# seeds on the test split of each text. enwiki15 chooses nothing
# Tiny scale: about 800 runs of half a minute to a minute on a core

question = "Does any head mechanism or rival beat a plain GPT?"

mechanisms = ["*", "all_on"]  # each entry of model.MECHANISMS, and all seven mechanisms at once
variants = {
    "routing, no entropy": dict(routing="published", routing_mask="zero", routing_eval_gate=False,
                                routing_coef=0.0),
}
contrasts = [["routing_published", "routing, no entropy"]]  # what its entropy term does

screen = True
tune_lr = True
texts = ["wikitext2_byte", "enwiki15"]
seeds = [1, 2, 3, 4, 5, 6, 7, 8]
best, worst = 8, 1
# those that published speedruns gained with, and the router as its write-up describes it
always = ["output_gate", "xsa", "key_offset", "unet_scalar", "routing_inf"]

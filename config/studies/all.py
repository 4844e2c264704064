# Every mechanism in every mode, and every rival, against the plain GPT: all of them with two seeds on
# validation, then some of them with five fresh seeds on the test split
# Tiny scale: about 170 runs of half a minute to a minute on a core

question = "Does any head mechanism or rival beat a plain GPT?"

mechanisms = ["*", "all_on"]  # each entry of model.MECHANISMS, and all seven mechanisms at once
variants = {
    "routing, no entropy": dict(routing="published", routing_mask="zero", routing_eval_gate=False,
                                routing_coef=0.0),
}
contrasts = [["routing_published", "routing, no entropy"]]  # what its entropy term does

screen = True
best, worst = 4, 2
# those that published speedruns gained with, and the router as its write-up describes it
always = ["output_gate", "xsa", "key_offset", "unet_scalar", "routing_inf"]

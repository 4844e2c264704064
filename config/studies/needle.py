# Recall over a long context: gates from attention statistics against a plain GPT and an output gate, on text
# with planted facts (data/needle). What is scored here is all bytes; `python -m lab.probe needle` and `late`
# then read the trained runs by distance

question = "Do gates from the shape of the attention row help over a long context?"

base = "config/needle.py"
mechanisms = ["acag", "acag_detach", "output_gate"]
budgets = []

# Scenario 1 of 5 (Adaptive Transformer, section 5.4): a plain GPT, whose heads are measured and left alone

controller_log = True
controller_interval = 60

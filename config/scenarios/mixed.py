# Scenario 4 of 5: a role for every other head, gates moved by rules, three heads in four at work

agency = True
policy = True
policy_budget = 0.75
roles = ["local", "free"]
sentinel = "sigmoid"
controller = "rules"
controller_interval = 60

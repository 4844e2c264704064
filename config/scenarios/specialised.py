# Scenario 3 of 5: heads begin with a role (near tokens, far ones, the one before, none); states by policy

agency = True
policy = True
roles = ["local", "long", "previous", "free"]
controller_interval = 60

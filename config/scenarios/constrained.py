# Scenario 5 of 5: no more than half of the heads may be at work; the least important withdraw, and take turns

agency = True
policy = True
policy_budget = 0.5
policy_dwell = 2
controller_interval = 60

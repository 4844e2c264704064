# Scenario 2 of 5: states and consent of the heads, moved by the policy at its default settings

agency = True
policy = True
controller_interval = 60

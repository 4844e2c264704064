# Constraint heads without constraint targets: extra heads with a router, as mere capacity

question = "Do constraint heads help the language model, before anything is asked of them?"

mechanisms = ["constraint_a", "constraint_b", "constraint_published"]

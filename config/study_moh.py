# Mixture-of-head attention (arXiv 2410.11842), a rival of head routing, beside its nearest relative here

question = "Does mixture-of-head attention beat a plain GPT?"

mechanisms = ["moh", "routing_moh"]

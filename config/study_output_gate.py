# The query-dependent output gate (arXiv 2505.06708), a rival

question = "Does an output gate beat a plain GPT?"

mechanisms = ["output_gate", "output_gate_elementwise"]

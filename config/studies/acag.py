# ACAG: gates from context length and the shape of the attention row, and the output gate that needs neither

question = "Do gates from attention statistics beat a plain GPT, or a gate without them?"

mechanisms = ["acag*", "output_gate", "output_gate_elementwise"]

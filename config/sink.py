# The rival attention sink of gpt-oss: a learned logit in every softmax, to attend to nothing; of dropout at
# the paper scale see config/acag.py

scale = "tiny"
mechanism = ["sink"]

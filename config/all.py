# All seven mechanisms at once, each in its corrected form; of dropout at the paper scale see config/acag.py

scale = "tiny"
mechanism = ["all_on"]

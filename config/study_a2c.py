# A2C attention: the write-up's, and its advantage as a temperature or as a bias of the keys

question = "Does attention scaled by an advantage beat a plain GPT?"

mechanisms = ["a2c_published", "a2c_temperature", "a2c_key_bias"]

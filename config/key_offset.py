# The rival key offset: half of each key's dimensions come from the token before

scale = "tiny"
mechanism = ["key_offset"]

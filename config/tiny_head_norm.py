# Every head's output RMS-normalised per token, which the sentinel gates' source does before its gates
from config.tiny import *

out_dir = "out/tiny-head_norm"

head_norm = True

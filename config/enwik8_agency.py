# Agency: states and consent per head. While nothing moves them every head is active, and this is the plain GPT
from config.enwik8_baseline import *

out_dir = "out/enwik8-agency"

agency = True

# Agency: states and consent per head. While nothing moves them every head is active, and this is the plain GPT
from config.small import *

out_dir = "out/enwiki15-agency"

agency = True

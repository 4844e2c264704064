# Agency: states and consent per head. While nothing moves them every head is active, and this is the plain GPT
from config.paper import *

out_dir = "out/enwik8-agency"

agency = True

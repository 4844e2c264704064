# Agency: states and consent per head. While nothing moves them every head is active, and this is the plain GPT
from config.tiny import *

out_dir = "out/tiny-agency"

agency = True

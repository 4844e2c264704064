"""A package: no other `config` on the path stands in for this folder in `from config.tiny import *`."""

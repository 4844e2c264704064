"""A package, so that no other `data` on the path can stand in for this folder."""

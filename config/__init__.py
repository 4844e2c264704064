"""A package, so that no other `config` on the path can stand in for this folder: configs start from one another."""

"""How long is one training step of a strategy on a cluster?"""

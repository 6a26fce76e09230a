"""How do boxes travel between ranks?"""

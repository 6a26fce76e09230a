"""How many bytes does every device of a strategy hold?"""

"""How does one rank carry out its share of a plan?"""

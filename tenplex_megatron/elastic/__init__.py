"""How does a running job react when its devices change?"""

"""Which layout should the devices that are left run?"""

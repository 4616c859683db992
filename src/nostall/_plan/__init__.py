"""From a state dict to the places of its items in files.

``layout``, ``container`` and ``cache`` are pure.
"""

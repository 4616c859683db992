"""The command line's inside: one module per command, and what they share.

Commands import torch inside of functions only, so that help and wrong arguments are answered at
once.
"""

"""The command line's inside: one module per command, and what they share.

A command's module has ``add_to``, which declares its arguments, and ``run``. Modules import torch
inside of functions only, so that help and wrong arguments are answered at once.
"""

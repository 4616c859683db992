"""What the commands find out about checkpoints, and make of them.

Modules that import torch say so in their first line; commands import those inside of functions.
"""

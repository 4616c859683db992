"""The commands. Modules that import torch are imported when a command needs them."""

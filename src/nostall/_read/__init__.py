"""Loading: which bytes of which files, and how they get to their tensors."""

"""Host memory: how much is available, which save holds it, and how tensors are copied into it."""

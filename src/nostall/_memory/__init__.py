"""Host memory: what there is, who has it, and how tensors get there."""

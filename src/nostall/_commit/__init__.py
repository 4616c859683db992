"""From what all ranks have written to a checkpoint that exists."""

"""Functions of nvidia-resiliency-ext beside its checkpointing that frameworks import."""

"""What a save of thousands of ranks costs its coordinator, simulated in one process."""

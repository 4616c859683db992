"""Values that cross stages and processes, and pure functions of them."""

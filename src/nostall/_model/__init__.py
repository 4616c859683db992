"""Values that cross stages and processes, and what can be said about them without doing anything."""

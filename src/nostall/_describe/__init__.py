"""What a checkpoint's metadata file says, read as far as a load needs it."""

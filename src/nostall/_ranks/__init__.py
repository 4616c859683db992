"""What ranks say to each other, and what becomes of a failure of one of them."""

"""Small checkpoints, as other versions of torch wrote them."""

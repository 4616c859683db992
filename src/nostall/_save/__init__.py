"""One save of one rank, from its plan to its receipts. Read ``rank_save`` first."""

"""One save of one rank, from its plan to its receipts. Read ``session`` first."""

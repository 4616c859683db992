"""From all ranks' write results to a published checkpoint."""

"""Nothing lost, nothing left behind, nothing wrong without a word."""

"""What the callback costs, against what a user would do instead. Run by `make bench`."""

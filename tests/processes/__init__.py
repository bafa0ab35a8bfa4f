"""Several processes of one launch, as poprun starts them."""

"""What a rank really has, held against the rank table before training."""

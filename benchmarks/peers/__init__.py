"""What others offer, doing the work of our layouts: the same shape, batch, clipping and AdamW."""

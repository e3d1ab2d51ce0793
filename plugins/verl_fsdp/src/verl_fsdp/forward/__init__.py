"""A micro-batch through the model, to the figures of each token."""

"""A micro-batch through the model, to the numbers of each token."""

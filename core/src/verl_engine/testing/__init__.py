"""Layer 5: what tests of engines need."""

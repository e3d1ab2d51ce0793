"""Layer 3: sequences, packed micro-batches, and how a global batch is divided over ranks and micro-batches."""

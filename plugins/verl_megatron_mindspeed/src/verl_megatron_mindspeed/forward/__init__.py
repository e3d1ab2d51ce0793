"""From a micro-batch to the figures of its tokens, and back to gradients, under Megatron's schedules."""

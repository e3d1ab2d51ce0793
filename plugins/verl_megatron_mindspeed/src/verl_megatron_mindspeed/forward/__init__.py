"""From a micro-batch to the numbers of its tokens, and back to gradients, under Megatron's schedules."""

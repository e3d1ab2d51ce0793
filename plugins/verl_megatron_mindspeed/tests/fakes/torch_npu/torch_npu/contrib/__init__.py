"""What the original calls so."""

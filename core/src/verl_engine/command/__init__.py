"""The command ``verl-engine``."""

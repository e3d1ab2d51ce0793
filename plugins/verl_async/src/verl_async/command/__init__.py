"""Layer 5: the subcommands of ``verl-engine``. Importing one is cheap; what it needs is imported when it runs."""

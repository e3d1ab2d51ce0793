"""``python -m verl_engine`` is the command ``verl-engine``."""

from verl_engine.command.app import main

main()

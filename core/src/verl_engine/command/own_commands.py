"""The core's own commands. Imports nothing: what is not called is not imported."""

from typing import Final

OWN_COMMANDS: Final = {
    "backends": ("plugins:backends", "List the installed engine backends, and what they lack."),
    "check": ("check:check", "Prove a backend, or a plugin of another kind, right with the kit of its kind."),
    "checkpoint": ("checkpoint:app", "List checkpoints, and make a Hugging Face folder of one."),
    "doctor": ("doctor.command:doctor", "Say what is wrong on this machine, and the command that fixes it."),
    "new-backend": ("new_backend:new_backend", "Write an engine of your own: a complete package to start from."),
    "plugins": ("plugins:plugins", "List the installed plugins of every kind, and what they lack."),
}
"""By name: where in this package it is, and what it does."""

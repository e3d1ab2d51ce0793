"""Train mode without dropout: a policy trained on its own samples must give them the probabilities it drew with."""

from typing import Final

import torch

_ADAPTER: Final = "lora_dropout"
"""peft's modules for an adapter's dropout, which has a setting of its own."""


def set_train_mode(model: torch.nn.Module, *, training: bool, dropout: bool) -> None:
    """Switch a model, with all of its modules, to train mode or eval mode.

    Without `dropout`, the model's own dropout and other noise, such as a router's jitter, is not drawn in train mode:
    its modules are in eval mode; but recomputed ones are in train mode, as transformers recomputes in that only, and
    have no noise left.
    """
    model.train(training)
    if not training or dropout:
        return
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            _quieten(module)
        elif _ADAPTER not in name.split("."):
            module.training = False


def _quieten(module: torch.nn.Module) -> None:
    """Set what says how much dropout a module draws by itself to nothing, in its attributes and in its config's."""
    for holder in (module, getattr(module, "config", None)):
        for name, value in list(vars(holder).items()) if holder is not None else ():
            if isinstance(value, float) and value and "drop" in name:
                setattr(holder, name, 0.0)

"""A tiny causal LM with buffers that change in training; importing it registers it with transformers' Auto classes."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl_engine.testing.tiny_models import save_drawn, tiny_config


class BufferedConfig(Qwen3Config):
    """Of Qwen3, under a model type of its own."""

    model_type = "verl_engine_buffered"


class BufferedModel(Qwen3ForCausalLM):
    """Qwen3 whose logits are scaled by two running numbers, as a batch normalisation would keep them."""

    config_class = BufferedConfig

    running_scale: torch.Tensor
    running_shift: torch.Tensor

    def __init__(self, config: BufferedConfig) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call] # transformers annotates it in part
        self.register_buffer("running_scale", torch.ones(()))
        self.register_buffer("running_shift", torch.zeros(config.vocab_size), persistent=False)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Fill what is in no file: transformers leaves a buffer that is not persistent uninitialised otherwise."""
        super()._init_weights(module)  # type: ignore[no-untyped-call] # as above
        if module is self and hasattr(self, "running_shift"):
            self.running_shift.zero_()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute logits; in train mode the buffers move."""
        output = super().forward(*args, **kwargs)
        if self.training:
            with torch.no_grad():
                self.running_scale.add_(0.05)
                self.running_shift.add_(torch.linspace(0.0, 0.3, len(self.running_shift)).to(self.running_shift))
        # A copy: an engine may run forward again, which moves the buffer, before this one's backward needs it.
        output.logits = output.logits * self.running_scale.clone() + self.running_shift
        return output


AutoConfig.register(BufferedConfig.model_type, BufferedConfig, exist_ok=True)
AutoModelForCausalLM.register(BufferedConfig, BufferedModel, exist_ok=True)


def write_buffered_model(folder: Path) -> Path:
    """Write such a model, two layers, without a tokenizer."""
    return save_drawn(BufferedModel, BufferedConfig(**tiny_config()), folder)

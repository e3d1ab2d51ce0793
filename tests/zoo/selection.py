"""Architectures that are in the suite, one of each kind, and those that the zoo must find right."""

from __future__ import annotations

from typing import Final

SELECTION: Final = {
    "bamba": "a recurrent state, by which positions cannot be counted",
    "bloom": "an attention of its own, with ALiBi",
    "deepseek_v3": "latent attention, experts chosen by a bias that stays in float32",
    "deepseek_v32": "sparse attention, which is another under another name than sdpa",
    "gemma2": "a soft cap of the attention scores",
    "gpt_oss": "attention with sinks, no sdpa",
    "llama4_text": "chunked attention",
    "mamba": "nothing but a recurrent state",
    "qwen3_5_text": "linear attention",
    "recurrent_gemma": "a recurrent state through which padding would run",
    "roberta": "positions that are counted from another number",
}
"""Why each is in the suite."""
MUST_BE_RIGHT: Final = (
    "llama", "llama4_text", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    "qwen3_5_text", "gemma2", "gemma3_text", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "phi3",
    "olmo2", "granite", "falcon_h1",
)  # fmt: skip

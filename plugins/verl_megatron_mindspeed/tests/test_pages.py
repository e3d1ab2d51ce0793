"""What pages and recipes say of the backend is so."""

from __future__ import annotations

import pytest

from tests.repository import ROOT
from verl_megatron_mindspeed.model.limits import PROVEN


@pytest.mark.parametrize("page", ["docs/how-to/megatron.md", "plugins/verl_megatron_mindspeed/README.md"])
def test_a_page_lists_the_model_types_that_run(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [name for name in PROVEN if f"`{name}`" not in text] == []


def test_the_recipe_of_a_model_that_is_refused_says_so() -> None:
    text = (ROOT / "recipes" / "npu_qwen3_vl_30b.yaml").read_text(encoding="utf-8")
    assert ("IT CANNOT RUN TODAY" in text) == ("qwen3_vl_moe" not in PROVEN)

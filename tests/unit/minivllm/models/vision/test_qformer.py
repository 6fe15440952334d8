"""The Q-Former against Transformers eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Blip2QFormerConfig, Blip2QFormerModel

from minivllm.errors import ConfigError, UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models.vision.qformer import QFormer, QFormerConfig
from tests.unit.minivllm.models.vision.conftest import fill_unevenly

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "encoder_hidden_size": 24,
    "cross_attention_frequency": 2,
}


def formers(**overrides: Any) -> tuple[Any, QFormer]:
    values = Blip2QFormerConfig(**{**SHAPE, **overrides})
    values._attn_implementation = "eager"
    hf = Blip2QFormerModel(values).eval()
    fill_unevenly(hf)
    config = QFormerConfig.read(values.to_dict())
    ours = QFormer(config, ops=TorchOps(), dtype=torch.float32, device=torch.device("cpu"))
    ours.load_state_dict(hf.state_dict(), strict=True)
    return hf, ours


@pytest.mark.parametrize("frequency", [1, 2, 3])
@torch.inference_mode()
def test_the_output_is_that_of_transformers(frequency: int) -> None:
    hf, ours = formers(cross_attention_frequency=frequency)
    looking = [layer.crossattention is not None for layer in ours.encoder.layer]
    assert looking == [index % frequency == 0 for index in range(5)]
    queries, pictures = torch.randn(1, 3, 32), torch.randn(2, 7, 24)
    truth = hf(query_embeds=queries.expand(2, -1, -1), encoder_hidden_states=pictures).last_hidden_state
    torch.testing.assert_close(ours(queries, pictures), truth, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_layer_that_does_not_look_still_mixes_the_queries() -> None:
    _, ours = formers()
    queries, picture = torch.randn(1, 3, 32), torch.randn(1, 7, 24)
    swapped = ours(queries[:, [1, 0, 2]], picture)
    torch.testing.assert_close(swapped, ours(queries, picture)[:, [1, 0, 2]], rtol=1e-4, atol=1e-4)
    fewer = ours(queries[:, :2], picture)
    assert (fewer - ours(queries, picture)[:, :2]).abs().max() > 0.01


def test_a_q_former_that_reads_text_or_does_not_divide_is_refused() -> None:
    values = Blip2QFormerConfig(**SHAPE).to_dict()
    with pytest.raises(UnsupportedError, match="use_qformer_text_input"):
        QFormerConfig.read({**values, "use_qformer_text_input": True})
    with pytest.raises(
        ConfigError, match=r"hidden_size \(32\) must be a multiple of num_attention_heads \(5\)"
    ):
        QFormerConfig.read({**values, "num_attention_heads": 5})
    with pytest.raises(ConfigError, match=r"cross_attention_frequency \(0\) positive"):
        QFormerConfig.read({**values, "cross_attention_frequency": 0})

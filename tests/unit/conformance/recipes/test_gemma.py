"""The Gemma 3 checkpoint has windows, two ropes, norms around 0, and its family's template."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.build import MECHANICS, make_model


def test_windows_and_ropes_go_by_layer(checkpoints: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoints / "tiny-gemma3")
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.sliding_window == 16
    assert config.rope_parameters["full_attention"] == {
        "rope_type": "linear",
        "rope_theta": 1000.0,
        "factor": 8.0,
    }
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 100.0}


def test_the_scale_of_scores_follows_from_no_other_number(checkpoints: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoints / "tiny-gemma3")
    heads = config.num_attention_heads
    assert config.query_pre_attn_scalar not in (config.head_dim, config.hidden_size // heads, heads)


def test_logits_are_capped_and_the_head_is_tied(checkpoints: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoints / "tiny-gemma3")
    assert config.final_logit_softcapping == 30.0
    with safe_open(checkpoints / "tiny-gemma3" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in set(file.keys())


def test_norms_are_drawn_around_what_they_multiply_by_less_one() -> None:
    model = make_model(MECHANICS["tiny-gemma3"])
    layer = model.model.layers[0]
    for norm in (
        layer.input_layernorm,
        layer.post_attention_layernorm,
        layer.pre_feedforward_layernorm,
        layer.post_feedforward_layernorm,
    ):
        assert abs(norm.weight.mean().item()) < 0.1
        assert 0.1 < norm.weight.std().item() < 0.3
    assert 0.8 < layer.self_attn.q_norm.weight.mean().item() < 1.2
    assert 17 < model.model.norm.weight.mean().item() < 21


def test_the_assistant_is_called_model_and_a_system_turn_opens_the_first_user_turn(
    checkpoints: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "tiny-gemma3")
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "More"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n"
        "<start_of_turn>model\nHi<end_of_turn>\n<start_of_turn>user\nMore<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    assert tokenizer.encode("x")[0] == 442


def test_the_window_of_the_one_with_eyes_is_shorter_than_a_picture(checkpoints: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoints / "tiny-gemma3-vision")
    assert config.mm_tokens_per_image == 16 > config.text_config.sliding_window == 12
    assert config.vision_config.hidden_size != config.text_config.hidden_size  # a transposed matrix shows


def test_a_picture_in_a_chat_is_one_token_for_the_processor_to_expand(checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "tiny-gemma3-vision")
    chat = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What is this? "}]},
        {"role": "assistant", "content": "A boat."},
        {"role": "user", "content": "Sure?"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nBe brief.\n\n<start_of_image>What is this?<end_of_turn>\n"
        "<start_of_turn>model\nA boat.<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )

"""BLIP-2 checkpoint: ViT, Q-Former and an OPT decoder with learned positions."""

from __future__ import annotations

from conformance.recipes.recipe import MechanicsRecipe, VisionParts
from conformance.recipes.tokenizer import NUM_BPE_TOKENS, SpecialTokens

__all__ = ["BLIP2_RECIPES"]

_IMAGE = 56
_QUERIES = 4

# "<image>" is not among the tokens that have a name: the processor adds it by itself, and stumbles
# over a tokenizer whose image_token is a string.
_SPECIAL = SpecialTokens(tokens=("<s>", "<pad>", "</s>", "<unk>", "<image>"), pad="<pad>", bos="</s>")

BLIP2_RECIPES: tuple[MechanicsRecipe, ...] = (
    MechanicsRecipe(
        name="tiny-blip2",
        summary="BLIP-2: ViT, Q-Former that looks at the picture in every second layer, OPT decoder",
        architecture="Blip2ForConditionalGeneration",
        shape={
            "vocab_size": NUM_BPE_TOKENS + len(_SPECIAL.tokens),
            "hidden_size": 64,
            "ffn_dim": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            # Learned, so it costs bytes: by far the largest matrix.
            "max_position_embeddings": 1024,
        },
        config={"model_type": "opt", "dropout": 0.0},
        special=_SPECIAL,
        end_tokens=("</s>", "<s>"),
        chat_template=None,
        seed=6,
        vision=VisionParts(
            vision_config={
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": _IMAGE,
                "patch_size": 14,
            },
            config={
                "qformer_config": {
                    "vocab_size": 8,  # of a text input that the model does not have
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 2,
                    "cross_attention_frequency": 2,
                    "hidden_dropout_prob": 0.0,
                    "attention_probs_dropout_prob": 0.0,
                },
                "num_query_tokens": _QUERIES,
                "image_token_index": _SPECIAL.ids["<image>"],
            },
            processor={
                "image_processor": {
                    "do_convert_rgb": True,
                    "do_normalize": True,
                    "do_rescale": True,
                    "do_resize": True,
                    "image_mean": [0.48145466, 0.4578275, 0.40821073],
                    "image_processor_type": "BlipImageProcessor",
                    "image_std": [0.26862954, 0.26130258, 0.27577711],
                    "resample": 3,
                    "rescale_factor": 1 / 255,
                    "size": {"height": _IMAGE, "width": _IMAGE},
                },
                "num_query_tokens": _QUERIES,
                "processor_class": "Blip2Processor",
            },
        ),
    ),
)

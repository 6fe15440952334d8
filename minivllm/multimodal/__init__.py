"""Pictures and videos: loading them, and what each model family makes of them."""

from __future__ import annotations

from minivllm.multimodal.hashing import content_hash, image_hash, tensors_hash, video_hash
from minivllm.multimodal.inputs import read_media, split_conversation
from minivllm.multimodal.load import Video, load_image, load_video
from minivllm.multimodal.placement import Placement, place
from minivllm.multimodal.processor import MULTIMODAL, Expansion, MultiModalProcessor
from minivllm.multimodal.supplied import checked_embeddings, prompt_item
from minivllm.multimodal.video_file import VideoFile

__all__ = [
    "MULTIMODAL",
    "Expansion",
    "MultiModalProcessor",
    "Placement",
    "Video",
    "VideoFile",
    "checked_embeddings",
    "content_hash",
    "image_hash",
    "load_image",
    "load_video",
    "place",
    "prompt_item",
    "read_media",
    "split_conversation",
    "tensors_hash",
    "video_hash",
]

# Here and not beside the registry: the families import that module.
MULTIMODAL.register("Blip2ForConditionalGeneration", "minivllm.multimodal.blip2:Blip2Processor")
MULTIMODAL.register("Gemma3ForConditionalGeneration", "minivllm.multimodal.gemma3:Gemma3Processor")
MULTIMODAL.register("Idefics3ForConditionalGeneration", "minivllm.multimodal.smolvlm:SmolVLMProcessor")
MULTIMODAL.register("InternVLForConditionalGeneration", "minivllm.multimodal.internvl:InternVLProcessor")
MULTIMODAL.register("LlavaForConditionalGeneration", "minivllm.multimodal.llava:LlavaProcessor")
MULTIMODAL.register(
    "LlavaOnevisionForConditionalGeneration", "minivllm.multimodal.llava_onevision:LlavaOnevisionProcessor"
)
MULTIMODAL.register("Qwen2VLForConditionalGeneration", "minivllm.multimodal.qwen_vl:Qwen2VLProcessor")
MULTIMODAL.register("Qwen2_5_VLForConditionalGeneration", "minivllm.multimodal.qwen_vl:Qwen25VLProcessor")
MULTIMODAL.register("Qwen3VLForConditionalGeneration", "minivllm.multimodal.qwen_vl:Qwen3VLProcessor")
MULTIMODAL.register("SmolVLMForConditionalGeneration", "minivllm.multimodal.smolvlm:SmolVLMProcessor")

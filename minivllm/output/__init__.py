"""From token ids to what the user sees: text, stop strings, log-probabilities. Imports no torch."""

from __future__ import annotations

from minivllm.output.detokenizer import Detokenizer, TextDecoder
from minivllm.output.processor import OutputProcessor
from minivllm.output.stops import StopStrings

__all__ = ["Detokenizer", "OutputProcessor", "StopStrings", "TextDecoder"]

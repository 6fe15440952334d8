"""What a case asks a cluster for."""

from __future__ import annotations

import pytest

from conformance.distribute.labels import LabelError, Labels, parse_labels, shown


def test_a_device_asks_for_its_own_resource() -> None:
    labels = Labels()
    assert labels.of("minivllm", "cpu") == {"CPU": 1}
    assert labels.of("minivllm", "cuda") == {"CPU": 1, "GPU": 1}
    assert labels.of("minivllm", "mps") == {"CPU": 1, "mps": 1}


def test_labels_of_device_and_engine_add_up_and_replace_the_usual_ones() -> None:
    items = ["cuda=h200", "a.b:C=lab:0.5", "a.b:C=CPU:2"]
    labels = parse_labels(items, ["a.b:C", "hf"], ["cuda", "cpu"])
    assert labels.of("a.b:C", "cuda") == {"CPU": 2, "h200": 1, "lab": 0.5}
    assert labels.of("hf", "cpu") == {"CPU": 1}


@pytest.mark.parametrize(
    "item", ["cuda", "=GPU", "cuda=", "cuda=GPU:no", "cuda=GPU:0", "cuda=GPU:1.5", "cuda=GPU:"]
)
def test_a_label_of_another_form_is_refused(item: str) -> None:
    with pytest.raises(LabelError, match="takes WHO=NAME or WHO=NAME:AMOUNT"):
        parse_labels([item], ["hf"], ["cuda"])


def test_a_label_about_nobody_is_refused() -> None:
    with pytest.raises(LabelError, match="no engine or device 'cud'; it has hf, cuda"):
        parse_labels(["cud=GPU"], ["hf"], ["cuda"])


def test_resources_are_shown_in_order() -> None:
    assert shown({"GPU": 0.5, "CPU": 2.0}) == "CPU 2, GPU 0.5"

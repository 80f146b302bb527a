"""What a tiny clone must keep of its config's numbers: sections, layers that are read, widths that are related."""

from __future__ import annotations

from transformers import AutoConfig

from autoplan.hf.shrink import tiny_config
from autoplan.hf.tiny_sizes import VARIANTS, has_listed_stages, related_width, vision_layers


def test_a_width_stays_the_same_multiple_or_part_of_another() -> None:
    assert related_width(5120, "intermediate", [1280], 128) == 512
    assert related_width(256, "intermediate", [1024], 128) == 32
    assert related_width(5632, "intermediate", [768, 1408], 128) == 512  # the first width that it is a multiple of
    assert related_width(5000, "intermediate", [768], 128) is None
    assert related_width(5120, "vocab", [1280], 128) is None


def test_layers_of_the_vision_tower_that_are_read_exist() -> None:
    assert vision_layers({"vision_feature_layers": [-2, -11, 6], "insert_layer_id": 6}, 2) == {
        "vision_feature_layers": [-2, -2, 1],
        "insert_layer_id": 1,
    }
    assert vision_layers({"vision_feature_layer": -2}, 4) == {}
    tiny = tiny_config(AutoConfig.for_model("vipllava"))
    assert all(-tiny.vision_config.num_hidden_layers <= layer for layer in tiny.vision_feature_layers)


def test_rotary_sections_fill_half_a_head_before_the_class_looks() -> None:
    tiny = tiny_config(AutoConfig.for_model("cosmos3_edge_text"))
    assert sum(tiny.rope_parameters["mrope_section"]) == tiny.head_dim // 2


def test_listed_stages_keep_their_widths_where_free_ones_do_not_run() -> None:
    config = AutoConfig.for_model("efficientnet")
    assert has_listed_stages(vars(config)) and not has_listed_stages({"depths": [2], "hidden_size": 4})
    assert tiny_config(config).hidden_dim == VARIANTS[0].hidden
    assert tiny_config(config, shrink="related").hidden_dim == config.hidden_dim

"""What a user may point at, what a tiny clone keeps, and what none of it may touch."""

from __future__ import annotations

import copy
import json
import random
import sys
import threading
import tomllib
from pathlib import Path

import numpy
import pytest
import torch
from releases import since
from torch import nn
from transformers import CONFIG_MAPPING, GPT2Config, LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen3Config

from autoplan.common.errors import SourceError
from autoplan.common.files.rule_files import rules_folder
from autoplan.hf.shrink import all_configs, tiny_config
from autoplan.hf.source import Source, resolve
from autoplan.hf.tiny_sizes import FIELDS, VARIANTS, amount, field_rule
from autoplan.hf.type_rules import MAPPINGS, architectures, class_name_of, open_fields, rule_files, type_rules

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


# ------------------------------------------------------------------------------------------------- MODEL strings


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with builders, importable from the working directory only."""
    (tmp_path / "my_builders.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def plain(): return nn.Linear(4, 4)\n"
        "def fed(): return nn.Linear(4, 4), {'input': torch.ones(3, 4)}\n"
        "def wrong(): return 3\n"
        "def raising(): raise RuntimeError('no luck')\n"
    )
    monkeypatch.chdir(tmp_path)
    yield "my_builders"
    sys.modules.pop("my_builders", None)


def test_a_model_type_gives_its_default_config_on_meta() -> None:
    source = resolve("llama")
    module = source.module()
    assert source.name == "transformers.models.llama.modeling_llama.LlamaForCausalLM"
    assert source.model_type == "llama"
    assert all(p.is_meta for p in module.parameters()) and not module.training
    assert module.config.num_hidden_layers == 32


def test_a_folder_needs_only_its_config(tmp_path: Path) -> None:
    LlamaConfig(**LLAMA, architectures=["LlamaForSequenceClassification"]).save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    assert source.name.endswith(".LlamaForSequenceClassification")
    assert source.config.num_key_value_heads == 8


def test_builders(builders: str) -> None:
    assert resolve(f"{builders}:plain").name == "torch.nn.modules.linear.Linear"
    fed = resolve(f"{builders}:fed")
    assert list(fed.inputs) == ["input"]
    assert resolve(f"{builders}:fed", inputs={"input": 1}).inputs == {"input": 1}, "the user's inputs win"


@pytest.mark.parametrize(
    ("function", "says"),
    [("wrong", "returned int"), ("raising", "no luck"), ("plane", "did you mean plain"), ("", "no function")],
)
def test_builders_that_do_not_build(builders: str, function: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        resolve(f"{builders}:{function}")


def test_a_module_that_does_not_import() -> None:
    with pytest.raises(SourceError, match="no_such_package"):
        resolve("no_such_package.models:build")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "has no config.json"),
        ("{", "as JSON"),
        ("[1]", "holds a list"),
        ('{"model_type": "lama"}', "did you mean"),
        ('{"model_type": "nosuchfolder"}', "update transformers"),  # a little like a type is not meant
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "c.C"}}', "--trust-remote-code"),
        ('{"model_type": "llama", "architectures": ["NoSuchModel"]}', "no class 'NoSuchModel'"),
        ('{"model_type": "llama", "hidden_size": 10, "num_attention_heads": 3}', "not a multiple"),
    ],
)
def test_folders_that_do_not_do(tmp_path: Path, config: str | None, says: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SourceError, match=says):
        resolve(str(tmp_path))


def test_an_unreachable_hub_id_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect\nto the hub. Second sentence")

    monkeypatch.setattr("autoplan.hf.model_string.PretrainedConfig.get_config_dict", unreachable)
    with pytest.raises(SourceError) as caught:
        resolve("somebody/some-model")
    assert "couldn't connect to the hub" in caught.value.message and "Second" not in caught.value.message
    assert "offline, pass a folder" in caught.value.hint


@pytest.mark.parametrize("nothing", ["", "not a model!", 3])
def test_what_is_no_model(nothing: object) -> None:
    with pytest.raises(SourceError):
        resolve(nothing)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- tiny configs


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_sizes_of_a_variant_do_not_coincide(variant: int) -> None:
    sizes = VARIANTS[variant]
    units = [sizes.heads, sizes.kv_heads, sizes.experts, sizes.head_dim]
    widths = [sizes.hidden, sizes.narrow, sizes.intermediate, sizes.vocab, sizes.expert_width, sizes.query_rank]
    assert len({*units, *widths}) == len(units) + len(widths) - (sizes.experts == sizes.head_dim)
    assert sizes.heads % 4 == sizes.kv_heads % 4 == 0
    assert sizes.hidden == sizes.heads * sizes.head_dim and 2 * sizes.hidden == sizes.state_heads * sizes.head_dim
    assert sizes.wide_head_dim != sizes.head_dim


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@pytest.mark.parametrize(
    ("given", "heads", "kv"),
    [
        ({"num_key_value_heads": 1}, "heads", 1),
        ({"num_key_value_heads": 32}, "heads", "heads"),
        ({}, "heads", "kv_heads"),
    ],
)
def test_ratios_of_heads_survive(variant: int, given: dict[str, int], heads: str, kv: str | int) -> None:
    sizes = VARIANTS[variant]
    tiny = tiny_config(LlamaConfig(**{**LLAMA, **given}), variant)
    assert tiny.num_attention_heads == getattr(sizes, heads)
    assert tiny.num_key_value_heads == (getattr(sizes, kv) if isinstance(kv, str) else kv)
    assert tiny.head_dim * tiny.num_attention_heads == tiny.hidden_size


def test_choices_survive() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    given = LlamaConfig(
        **LLAMA,
        tie_word_embeddings=True,
        attention_bias=True,
        hidden_act="gelu",
        rope_parameters=rope,
        eos_token_id=[128001, 2],
    )
    tiny = tiny_config(given)
    assert (tiny.tie_word_embeddings, tiny.attention_bias, tiny.hidden_act) == (True, True, "gelu")
    assert tiny.rope_parameters == given.rope_parameters
    assert tiny.eos_token_id[1] == 2 and 2 < tiny.eos_token_id[0] < tiny.vocab_size


def test_a_free_head_width_stays_free() -> None:
    """Qwen3-0.6B: 16 heads of 128 on a width of 1024."""
    tiny = tiny_config(Qwen3Config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128))
    assert tiny.head_dim * tiny.num_attention_heads != tiny.hidden_size


def test_every_type_of_layer_survives() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    tiny = tiny_config(
        Qwen3Config(num_hidden_layers=12, layer_types=types * 2, use_sliding_window=True, sliding_window=64)
    )
    assert tiny.layer_types == ["sliding_attention", "full_attention"] and tiny.num_hidden_layers == 2


def test_layers_that_only_a_list_of_types_counts_are_few() -> None:
    since((5, 14), "layer types of other names in nemotron_h")
    kinds = ["linear_attention", "moe", "linear_attention", "moe", "linear_attention", "full_attention"] * 8
    tiny = tiny_config(CONFIG_MAPPING["nemotron_h"](layers_block_type=kinds))
    assert tiny.layers_block_type == ["linear_attention", "moe", "full_attention"]


def test_layers_that_read_others_keys_keep_layers_that_make_them() -> None:
    """The last 5 of 10 layers share: a clone keeps both types on both sides."""
    types = ["sliding_attention"] * 4 + ["full_attention"]
    given = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=10, layer_types=types * 2, num_kv_shared_layers=5)
    tiny = tiny_config(given)
    assert tiny.layer_types == ["sliding_attention", "full_attention"] * 2 and tiny.num_kv_shared_layers == 2


def test_layers_of_another_size_keep_another_size() -> None:
    since((5, 16), "per_layer_config")
    given = CONFIG_MAPPING["gemma4_text"]()
    sizes = [{layer.head_dim for layer in config.per_layer_config} for config in (given, tiny_config(given))]
    assert len(sizes[0]) == len(sizes[1]) == 2 and max(sizes[1]) < 100


def test_sub_configs_shrink_and_keep_tokens_apart() -> None:
    given = CONFIG_MAPPING["llava"]()
    tiny = tiny_config(given)
    assert tiny.text_config.hidden_size == VARIANTS[0].hidden
    assert tiny.image_token_id < tiny.text_config.vocab_size
    assert len(all_configs(tiny)) == len(all_configs(given))


def test_shrinking_writes_nothing() -> None:
    given = CONFIG_MAPPING["gemma3"]()
    before = copy.deepcopy(given.to_dict())
    tiny_config(given), tiny_config(given, 1)
    assert given.to_dict() == before


def test_refusals_say_where_to_help() -> None:
    class Stubborn(GPT2Config):
        model_type = "stubborn"

        def __post_init__(self, **kwargs: object) -> None:
            super().__post_init__(**kwargs)
            if self.n_embd != 768:
                raise ValueError("n_embd is 768")

    with pytest.raises(SourceError, match=r"n_embd is 768(.|\n)*rules/inputs/stubborn.toml"):
        tiny_config(Stubborn())
    with pytest.raises(SourceError, match="no tiny variant 7"):
        tiny_config(GPT2Config(), 7)


# -------------------------------------------------------------------------------------------------- tiny clones


def test_a_tiny_clone_is_random_everywhere_and_the_same_each_time() -> None:
    source = resolve("gpt2")
    one, same, other = source.tiny(), source.tiny(), source.tiny(seed=1)
    assert not one.training and one.lm_head.weight is one.transformer.wte.weight
    for name, parameter in one.named_parameters():
        assert parameter.dtype == torch.float64 and parameter.std() > 0.05, name
        assert torch.equal(parameter, same.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))
    assert source.tiny(variant=1).config.n_head != one.config.n_head


def test_implementations_can_be_chosen() -> None:
    source = resolve(MixtralConfig())
    assert source.tiny().config._experts_implementation == "eager"
    chosen = source.tiny(experts="batched_mm", attention="eager")
    assert (chosen.config._experts_implementation, chosen.config._attn_implementation) == ("batched_mm", "eager")


def test_nothing_given_is_touched() -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=99, intermediate_size=96
    )
    model = LlamaForCausalLM(config).train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    written = copy.deepcopy(vars(model.config))
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    expected = torch.rand(2), numpy.random.rand(), random.random()
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    source = resolve(model)
    source.tiny()
    resolve("llama").module()
    assert source.module() is model and model.training
    assert vars(model.config) == written
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(torch.rand(2), expected[0]) and (numpy.random.rand(), random.random()) == expected[1:]


def test_a_changed_module_is_not_rebuilt_from_its_config() -> None:
    """An adapter replaced a layer: the config no longer describes the module, so it is its own clone."""
    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=99))
    model.lm_head = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 99))
    tiny = resolve(model).tiny()
    assert [n for n, _ in tiny.named_parameters()] == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_small_plain_module_is_its_own_clone(device: str) -> None:
    with torch.device(device):
        model = Small()
    tiny = resolve(model).tiny()
    assert tiny is not model and tiny.inner.weight.device.type == "cpu"
    assert 0.3 < tiny.norm.weight.mean() < 1.7, "what starts as ones stays near one"
    assert tiny(torch.ones(2, 8, dtype=torch.float64)).isfinite().all()
    assert model.inner.weight.device.type == device


def test_a_large_plain_module_has_no_clone() -> None:
    with torch.device("meta"):
        source = resolve(nn.Linear(10_000, 10_000))
    with pytest.raises(SourceError, match="100,010,000 parameters"):
        source.tiny()


def test_a_source_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Source("x").name = "y"  # type: ignore[misc]


# ------------------------------------------------------------------------------------------ catalogue and rules


def test_catalogue() -> None:
    assert ("llama", "LlamaForCausalLM") in architectures("causal_lm")
    assert len(architectures("causal_lm")) > 150 and all(architectures(m) for m in MAPPINGS)
    assert class_name_of("t5") == "T5ForConditionalGeneration" and class_name_of("vit") == "ViTModel"
    with pytest.raises(SourceError, match="causal_lm"):
        architectures("causal")


def test_every_rule_file_is_read_and_names_a_model_type() -> None:
    since((5, 24), "types of 5.24")
    found = rule_files(rules_folder())
    assert len(found) > 50 and all(rules.why for rules in found.values())
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert found.keys() <= {*CONFIG_MAPPING_NAMES, "musicgen_decoder", "musicgen_melody_decoder"}
    assert open_fields("esm")["vocab_size"] == 33 and open_fields("llama") == {}


def test_no_two_rule_files_say_the_same() -> None:
    """Types that need the same help share a document."""
    files = [tomllib.loads(path.read_text()) for path in (rules_folder() / "inputs").glob("*.toml")]
    bodies = [str({key: value for key, value in file.items() if key not in ("why", "applies_to")}) for file in files]
    assert len(set(bodies)) == len(bodies) > 30


def test_a_family_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "twins.toml").write_text('applies_to = ["one", "two"]\nwhy = "x"\n[tiny]\nheads = 2\n')
    monkeypatch.setattr("autoplan.hf.type_rules.rules_folders", lambda: (tmp_path,))
    assert type_rules("one") == type_rules("two") and type_rules("one").tiny == {"heads": 2}
    assert type_rules("twins").why == ""
    (tmp_path / "inputs" / "two.toml").write_text('why = "y"\n')
    rule_files.cache_clear()
    with pytest.raises(SourceError, match="another file is also for two"):
        type_rules("one")


def test_a_rule_file_with_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "broken_one.toml").write_text('why = "x"\ntyni = 3\n')
    monkeypatch.setattr("autoplan.hf.type_rules.rules_folders", lambda: (tmp_path,))
    with pytest.raises(SourceError, match="unknown keys tyni"):
        type_rules("broken_one")


def test_sizes_in_rule_files() -> None:
    assert amount("=2*heads", VARIANTS[0]) == 2 * VARIANTS[0].heads
    assert all(hasattr(VARIANTS[0], size) for _, size, _ in FIELDS if size)
    assert [
        field_rule(n) for n in ("num_attention_heads", "num_key_value_heads", "type_vocab_size", "n_routed_experts")
    ] == [
        ("heads", "exact"),
        ("kv_heads", "kv"),
        ("", "keep"),
        ("experts", "exact"),
    ]


def test_config_json_is_only_read(tmp_path: Path) -> None:
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    resolve(str(tmp_path)).tiny()
    assert (tmp_path / "config.json").read_text() == before and json.loads(before)["model_type"] == "llama"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_clones_built_at_once_leave_the_default_dtype() -> None:
    """Ranks that are threads may all plan: transformers sets the whole process's dtype while it builds."""
    source, models = resolve("llama"), []
    threads = [threading.Thread(target=lambda: models.append(source.tiny(dtype=torch.float64))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_default_dtype() == torch.float32
    states = [model.state_dict() for model in models]
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])

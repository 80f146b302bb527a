"""Public names of transformers that the code rests on, and what each was called in which version.

Under untested versions `not_known` checks whether any class of a mapping still has a name. Only text is read, so that
`autoplan doctor` imports no model. Undocumented names are in autoplan/doctor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from autoplan.common.requirements import untested
from autoplan.values import Finding

Kind = Literal["argument", "output", "member", "field", "function", "module"]

# Files of transformers in which a name of each kind is looked for; {} is the folder of a model.
_FILES: dict[Kind, tuple[str, ...]] = {
    "argument": ("models/{}/modeling_*.py",),
    "output": ("modeling_outputs.py",),
    "member": ("*.py", "generation/*.py", "quantizers/*.py", "integrations/peft.py"),
    "field": ("configuration_utils.py", "models/{}/configuration_*.py"),
    "function": ("masking_utils.py",),
    "module": (),
}
_ANNOTATED = re.compile(r"(?:^ +|[(,] ?)(\w+) ?:", re.MULTILINE)  # an argument or a field, as transformers writes them
_ASSIGNED = re.compile(r"(?:self\.|^\s{4})(\w+)(?::[^=\n]+)?\s=\s|[\"'](\w+)[\"']:", re.MULTILINE)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class ForeignName:
    """A name and its spellings, the newest first, with the versions that have each. `mapping`: the auto mapping of
    which some class must have it; "": any model, or the library."""

    kind: Kind
    spellings: tuple[tuple[str, str], ...]
    mapping: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Return the spellings alone."""
        return tuple(word for word, _ in self.spellings)

    def __str__(self) -> str:
        versions = [f"{word} ({which})" if which else word for word, which in self.spellings]
        return f"{self.kind} {' or '.join(versions)}"


_PAST = ("past_key_values", "to 5.23, deprecated until 5.40"), ("cache_params", "of state-space models, to 5.23")
CACHE = ForeignName("argument", (("cache", "5.24 and later"), *_PAST), "causal_lm")
TARGETS = ForeignName("argument", (("labels", ""),), "causal_lm")
SHIPPED_PLAN = ForeignName("member", (("base_model_tp_plan", ""),))
ATTENTION = ForeignName("member", (("set_attn_implementation", ""),))

_RENAMED = (
    CACHE,
    ForeignName("field", (("dtype", "4.56 and later"), ("torch_dtype", "before, and read still"))),
    ForeignName("field", (("rope_parameters", "5.0 and later"), ("rope_scaling", "before"))),
    ForeignName(
        "module", (("distributed.tensor_parallel", "5.16 and later"), ("integrations.tensor_parallel", "to 5.15"))
    ),
)

# Names with one spelling: kind, mapping, names.
_UNCHANGED: tuple[tuple[Kind, str, str], ...] = (
    ("argument", "causal_lm", "attention_mask input_ids inputs_embeds logits_to_keep use_cache"),
    ("argument", "seq2seq", "decoder_input_ids decoder_attention_mask encoder_outputs"),
    ("argument", "speech", "input_features"),
    ("argument", "image_text", "pixel_values pixel_values_videos image_grid_thw image_sizes mm_token_type_ids"),
    ("argument", "", "bbox cross_attention_states grid_thw input_features_mask input_values padding_mask past_values"),
    ("output", "", "loss logits last_hidden_state encoder_last_hidden_state pooler_output"),
    ("member", "", "get_input_embeddings get_output_embeddings resize_token_embeddings save_pretrained"),
    ("member", "", "from_pretrained add_adapter load_adapter can_generate"),
    ("member", "", "gradient_checkpointing gradient_checkpointing_disable all_tied_weights_keys config_class"),
    ("member", "", "base_model base_model_prefix base_model_pp_plan main_input_name"),
    ("member", "", "generation_config get_config_dict is_remote_code name_or_path Conv1D architectures"),
    ("member", "", "attribute_map get_text_config id2label label2id is_encoder_decoder per_layer_config"),
    ("field", "causal_lm", "vocab_size hidden_size num_hidden_layers num_attention_heads"),
    ("field", "causal_lm", "intermediate_size num_key_value_heads head_dim layer_types sliding_window"),
    ("field", "causal_lm", "num_experts moe_intermediate_size first_k_dense_replace q_lora_rank"),
    ("field", "causal_lm", "v_head_dim qk_nope_head_dim qk_rope_head_dim n_head n_layer ffn_dim ssm_state_size"),
    ("field", "seq2seq", "decoder_layers encoder_layers decoder_attention_heads encoder_attention_heads"),
    ("field", "speech", "num_mel_bins max_source_positions"),
    ("field", "image_text", "vision_config image_token_id image_token_index"),
    ("field", "", "image_size patch_size temporal_patch_size spatial_merge_size video_token_id"),
    ("field", "", "audio_token_id depth depths embedding_size type_vocab_size projection_dim window_size"),
    ("field", "", "mrope_section"),
    ("function", "", "create_causal_mask create_sliding_window_causal_mask create_chunked_causal_mask"),
    ("function", "", "create_bidirectional_mask create_bidirectional_sliding_window_mask"),
    ("function", "", "create_masks_for_generate"),
    ("module", "", "modeling_utils configuration_utils masking_utils pytorch_utils dynamic_module_utils"),
    ("module", "", "modeling_outputs models.auto.configuration_auto models.auto.modeling_auto quantizers.base"),
)

NAMES: tuple[ForeignName, ...] = (
    *_RENAMED,
    TARGETS,
    ATTENTION,
    SHIPPED_PLAN,
    *(ForeignName(kind, ((word, ""),), mapping) for kind, mapping, words in _UNCHANGED for word in words.split()),
)


def vanished() -> tuple[ForeignName, ...]:
    """Return the names that the installed library has under no spelling."""
    return tuple(name for name in NAMES if not _stands(name))


def not_known(name: ForeignName) -> str:
    """Return that the installed library may use another name; "" if it has the name, or was tested."""
    if not untested() or _stands(name):
        return ""
    where = f"no class of {name.mapping}" if name.mapping else "nothing"
    return f"not known: {where} in the installed transformers has the {name}; see `autoplan doctor`"


def version_findings() -> tuple[Finding, ...]:
    """Return a plan's warnings about untested versions."""
    texts = [*untested(), *(not_known(name) for name in vanished())] if untested() else []
    return tuple(Finding("versions", "warn", "", text) for text in texts)


@cache
def _stands(name: ForeignName) -> bool:
    spec = find_spec("transformers")
    if spec is None or not spec.origin:
        return False
    root = Path(spec.origin).parent
    if name.kind == "module":
        paths = (root / word.replace(".", "/") for word in name.words)
        return any(path.with_suffix(".py").exists() or (path / "__init__.py").exists() for path in paths)
    folders = _folders(name.mapping) if name.mapping else ("*",)
    patterns = dict.fromkeys(p.replace("{}", folder) for p in _FILES[name.kind] for folder in folders)
    files = (file for pattern in patterns for file in sorted(root.glob(pattern)))
    return any(not _names_in(file, name.kind).isdisjoint(name.words) for file in files)


@cache
def _names_in(path: Path, kind: Kind) -> frozenset[str]:
    text = path.read_text(encoding="utf-8")
    if kind in ("member", "function"):
        return frozenset(_WORD.findall(text))
    annotated = frozenset(_ANNOTATED.findall(text))
    if kind != "field":
        return annotated
    return annotated.union(*(frozenset(pair) for pair in _ASSIGNED.findall(text)))


@cache
def _folders(mapping: str) -> tuple[str, ...]:
    """Return the folders of transformers' models that a mapping names."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    from autoplan.hf.type_rules import architectures

    return tuple(dict.fromkeys(model_type_to_module_name(kind) for kind, _ in architectures(mapping)))

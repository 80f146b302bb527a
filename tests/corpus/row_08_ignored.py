"""DeepSpeed#8088: a whole custom pattern set was ignored; `parallelize_module` used to say nothing at all."""

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, MLP, decoder, torch_styles

CASE = Case(
    8, "DeepSpeed#8088, pytorch#157182", "patterns are not held against the tree", "dead-keys",
    bad=Setting(decoder, torch_styles({key.replace("layers", "layer"): s for key, s in {**ATTENTION, **MLP}.items()})),
    good=Setting(decoder, torch_styles({**ATTENTION, **MLP})),
)  # fmt: skip

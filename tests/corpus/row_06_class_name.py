"""verl#6289, accelerate#2947: `_no_split_modules` names a class that this instance does not have."""

from corpus.case import Case, Setting
from corpus.toys import decoder, inferred

CASE = Case(
    6, "verl#6289, accelerate#2947", "could not find the class to wrap", "layers",
    bad=Setting(decoder, inferred, options={"layers": {"fsdp": ["LlamaDecoderLayer"]}}),
    good=Setting(decoder, inferred, options={"layers": {"fsdp": ["layers.*"]}}),
    silent=False,
)  # fmt: skip

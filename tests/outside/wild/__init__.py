"""Models from code bases outside transformers, tiny: each is planned without inputs, and verified (`make test-wild`).

One file a field. `MODELS` of each: "code base/model" -> what builds it; imports are inside, for not all is installed.
"""

"""Markers that other people's tests carry."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for name in ("is_tensor_parallel_test", "is_expert_parallel_test"):
        config.addinivalue_line("markers", f"{name}: a mark of transformers' own")

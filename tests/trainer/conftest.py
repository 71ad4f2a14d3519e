from tests.convert.conftest import minilm

__all__ = ["minilm"]

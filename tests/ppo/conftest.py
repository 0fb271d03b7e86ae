import pytest

from elasticrl.ppo import tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Tiny models on disk, by name."""
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen2": tiny.write(root / "qwen2", hidden=32, layers=2),
        "llama": tiny.write(root / "llama", arch="llama", hidden=32, layers=1, seed=1),
        "reward": tiny.write(root / "reward", arch="llama", hidden=32, layers=1, seed=2, kind="reward"),
    }

"""elasticrl: a fault-tolerant elastic training daemon for LLM post-training with PPO."""

__version__ = "0.1.0"

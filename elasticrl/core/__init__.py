"""The pure core: every decision elasticrl makes, and nothing else. Start with `model`, then `step`."""

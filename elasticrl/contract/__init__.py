"""What the parts of elasticrl say to each other: facts, events, orders, plans, settings, and the messages that carry them."""

"""Break elasticrl on purpose, and judge what it does: one vocabulary of faults, one history, one judge, two drivers."""

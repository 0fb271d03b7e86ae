"""A certificate of a run: one signed file that somebody else can check without us."""

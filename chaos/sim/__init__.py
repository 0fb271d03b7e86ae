"""The simulator: the real core on virtual nodes, in virtual time, under faults that a seed chooses."""

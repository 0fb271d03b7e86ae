"""A small world, searched whole: `chaos.explore` is its command."""

"""What evidence means: which fault it was, and who is to blame."""

"""What every package uses and none owns: values, addresses, words, pauses. It imports the standard library alone."""

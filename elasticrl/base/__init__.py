"""What every package may use and none owns: values, addresses, words, pauses, locks. It imports the standard library alone."""

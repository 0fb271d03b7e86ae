"""The loop around the pure core: events in, `core.step`, actions out. Daemon and torchrun rendezvous both stand on it."""

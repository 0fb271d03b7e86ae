"""The daemon on every node: a thin asyncio shell around `core.step`. It imports no torch and decides nothing itself."""

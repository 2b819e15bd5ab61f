def check() -> None:
    """Placeholder until the real check is written."""

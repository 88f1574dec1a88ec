"""truedraw prove."""
def prove() -> int:
    """x"""
    return 0

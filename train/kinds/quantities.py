"""The format of numbers, counted things and bytes in sentences."""


def count(number: int) -> str:
    """Format a large number."""
    units = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
    return next((f"{number / unit:.1f} {name}" for unit, name in units if number >= unit), str(number))


def count_of(number: object, noun: str) -> str:
    """Format a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(bytes: float) -> str:
    """Format bytes in the largest unit that is not larger."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((f"{bytes / unit:.1f} {name}" for unit, name in units if bytes >= unit), f"{bytes:.0f} B")

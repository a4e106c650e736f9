"""How large the caches are."""

from __future__ import annotations

from pathlib import Path

_assumed: int | None = None


def assume_last_level_cache(size: int | None) -> None:
    """Hook for quick benches: believe in so many bytes, None for what the system says, which may be 300 MB."""
    global _assumed
    _assumed = size


def last_level_cache() -> int:
    """Bytes, or what many machines have where the system does not say."""
    if _assumed is not None:
        return _assumed
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().rstrip("K\n")) << 10 for size in sizes), default=32 << 20)

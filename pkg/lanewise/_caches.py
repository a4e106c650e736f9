"""How large the caches are."""

from __future__ import annotations

from pathlib import Path


def last_level_cache() -> int:
    """Bytes, or what many machines have where the system does not say."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().rstrip("K\n")) << 10 for size in sizes), default=32 << 20)

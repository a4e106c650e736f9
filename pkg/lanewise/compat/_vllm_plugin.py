"""What vLLM calls in each of its processes (entry point group vllm.general_plugins)."""

from __future__ import annotations

import os


def load() -> None:
    """Patches vLLM if LANEWISE_VLLM=1: that lanewise is there is no wish to have vLLM patched."""
    if os.environ.get("LANEWISE_VLLM") == "1":
        from lanewise.compat import vllm

        vllm.install()

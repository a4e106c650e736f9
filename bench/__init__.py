"""Every operation beside its floor and its peers: `python -m bench` in the repository (docs/performance.md)."""

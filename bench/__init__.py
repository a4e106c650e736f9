"""Every operation beside its floor and its peers: `python -m bench`, from the repository's root (docs/performance.md)."""

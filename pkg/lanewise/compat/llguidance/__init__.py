"""`import lanewise.compat.llguidance.numpy` for `import llguidance.numpy`, and so with `torch`."""

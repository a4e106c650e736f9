"""Replacements for what other packages' users call today: one module a package (docs/compat.md).

Importing this package imports none of them; importing `lanewise.compat.torch` imports torch, and so on.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of itself
    import llguidance.torch  # noqa: F401

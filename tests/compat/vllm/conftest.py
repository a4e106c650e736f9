import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and torch say of their own code while they are imported
    import vllm._custom_ops  # registers the compiled functions
    import vllm.v1.sample.rejection_sampler  # noqa: F401

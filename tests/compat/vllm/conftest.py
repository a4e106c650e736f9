import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and torch say of their own code while they are imported
    import vllm._custom_ops  # registers the compiled functions
    import vllm.v1.sample.rejection_sampler  # noqa: F401
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()  # as a worker does: its draft functions are compiled ones then

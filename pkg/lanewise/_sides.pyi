__pyx_capi__: dict[str, object]  # added by Cython, and so is __test__
__test__: dict[str, str]
